"""The service and its clients over real sockets, in one process."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from paceline.control.exit_codes import ENDED, FAILED, INTERRUPTED
from paceline.control.journal.reader import RunReader
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import Fail
from paceline.control.messages.agents import AgentDirective, ProcessVitals
from paceline.control.messages.members import Report, Verdict
from paceline.control.messages.plan import Phase
from paceline.control.shell.client import AgentClient, MemberClient, command
from paceline.control.shell.config import Config
from paceline.control.shell.courier import reach
from paceline.control.shell.line import Bell, ControlConnection
from paceline.control.shell.service import StatusAnswer
from paceline.control.shell.ticket import ACCESS_FILE, Ticket, read_access
from paceline.errors import CallFailed, ConnectionLost, HandshakeRefused, WireError
from paceline.testing import faults
from paceline.testing.eventually import eventually
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity
from tests.control.helpers import Net, Trainee, introduction_of, new_config, serving, team, training


def soon() -> Deadline:
    return Deadline(20.0, "a test")


def status(ticket: Ticket) -> StatusAnswer:
    return command(ticket, "status", answer_type=StatusAnswer, deadline=soon())


def connect(ticket: Ticket, identity: Identity, room: str = "control", role: str = "worker") -> Connection:
    return reach(ticket, Credentials(identity, ticket.secret, role), room, deadline=soon())


def ends(connection: Connection) -> bool:
    """Whether the other side closes this connection; what it sends before is read."""
    try:
        while True:
            connection.receive(deadline=soon())
    except ConnectionLost:
        return True
    finally:
        connection.close()


def test_rows_outlive_a_main_member_that_is_lost_at_the_end(tmp_path: Path) -> None:
    """There is no plan after the end that would make another one main."""
    trainees: list[Trainee] = []

    def is_main(member: str) -> bool:
        return any(plan.rank_of(member) == 0 for trainee in trainees for plan in trainee.plans)

    with faults.lost("progress", is_main), serving(new_config(tmp_path, wanted=2)) as running:
        with team(running.ticket) as members:
            trainees = members.trainees
            for _ in range(2):
                members.join(num_steps=30)
            for trainee in trainees:
                assert trainee.exited.wait(20.0)
            next(trainee for trainee in trainees if trainee.plans[0].rank_of(trainee.name) == 0).vanish()
        assert running.join() == ENDED
    with RunReader(tmp_path) as reader:
        assert [step.operation for step in reader.steps()] == list(range(1, 32))


def test_a_run_goes_from_the_first_member_to_the_end(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=3, most=5)) as running:
        with training(running.ticket, 3, num_steps=30) as trainees:
            for trainee in trainees:
                assert trainee.exited.wait(20.0)
        assert running.join() == ENDED
    assert {trainee.exit.verdict for trainee in trainees if trainee.exit} == {Verdict.RELEASED}
    assert {tuple(trainee.applied) for trainee in trainees} == {tuple(range(1, 32))}
    with RunReader(tmp_path) as reader:
        seen = reader.status()
        assert (seen.name, seen.status, seen.num_steps, seen.num_samples) == ("test", "ended", 31, 124)
        assert seen.ended >= seen.started > 0
        assert seen.facts == {"model": "m"}
        assert [step.operation for step in reader.steps(since=20)] == list(range(21, 32))
        assert {member.fate for member in reader.members()} == {"released"}
        (plan,) = reader.plans()
        assert sorted(plan.members) == sorted(trainee.name for trainee in trainees)
        kinds = [event.kind for event in reader.events()]
        assert kinds.count("joined") == 3
        assert kinds.count("plan") == 1
        first = reader.events()[0]
        assert all(event.id > first.id for event in reader.events(first.id))
    assert not (tmp_path / ACCESS_FILE).exists()


def test_newcomers_and_deaths_make_new_plans(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=2)) as running:
        with team(running.ticket) as members:
            first, second = members.join(), members.join()
            eventually(lambda: len(first.applied) > 5, "the run to start")
            third = members.join()
            eventually(lambda: len(third.applied) > 5, "the newcomer to take part")
            second.vanish()
            reached = len(first.applied)
            eventually(lambda: len(first.applied) > reached + 5, "the others to go on")
            assert first.applied == list(range(1, len(first.applied) + 1))
            fates = {row["member"]: row["fate"] for row in status(running.ticket).members}
            assert fates == {first.name: "", second.name: "dead", third.name: ""}
            command(running.ticket, "halt", "enough", answer_type=bool, deadline=soon())
            assert first.exited.wait(20.0)
            assert third.exited.wait(20.0)
        assert running.join() == ENDED
    with RunReader(tmp_path) as reader:
        assert reader.status().reason == "enough"
        assert [step.times_done for step in reader.steps()] == [1] * len(reader.steps())
        assert [step.operation for step in reader.steps()] == first.applied


def test_who_is_drained_leaves_and_the_others_go_on(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=2)) as running, training(running.ticket, 2) as (first, second):
        eventually(lambda: len(first.applied) > 5, "the run to start")
        command(running.ticket, "drain", second.name, answer_type=type(None), deadline=soon())
        assert second.exited.wait(5.0)
        assert second.exit is not None
        assert second.exit.verdict is Verdict.RELEASED
        reached = len(first.applied)
        eventually(lambda: len(first.applied) > reached + 5, "the other to go on")
        with pytest.raises(CallFailed, match=r"the only worker that is at work.* `paceline stop`"):
            command(running.ticket, "drain", first.name, answer_type=type(None), deadline=soon())
        reached = len(first.applied)
        eventually(lambda: len(first.applied) > reached + 5, "it to go on")


def test_main_leaves_its_rows_to_the_next_one(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=2)) as running, training(running.ticket, 2) as trainees:
        eventually(lambda: all(len(trainee.applied) > 20 for trainee in trainees), "some steps")
        main = next(trainee for trainee in trainees if trainee.name == trainees[0].plans[0].members[0])
        other = next(trainee for trainee in trainees if trainee is not main)
        main.vanish()
        reached = other.applied[-1] + 5
        with RunReader(tmp_path) as reader:
            eventually(lambda: any(row.operation >= reached for row in reader.steps()), "the other's rows")
            operations = [row.operation for row in reader.steps()]
            assert operations == list(range(1, operations[-1] + 1))


def test_unknown_members_are_named_to_who_drains_them(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running, pytest.raises(CallFailed, match="no member 'nobody'"):
        command(running.ticket, "drain", "nobody", answer_type=type(None), deadline=soon())


def test_stopping_the_coordinator_does_not_end_the_run(tmp_path: Path) -> None:
    config = new_config(tmp_path, wanted=2)
    with serving(config) as first, training(first.ticket, 2) as trainees:
        eventually(lambda: len(trainees[0].applied) > 5, "the run to start")
        first.stop()
        assert first.code == INTERRUPTED
        with RunReader(tmp_path) as reader:
            assert reader.status().status == "interrupted"
        reached = len(trainees[0].applied)
        eventually(lambda: len(trainees[0].applied) > reached + 20, "training without a coordinator")
        with serving(config) as second:
            assert second.ticket == first.ticket
            eventually(lambda: {row["phase"] for row in status(second.ticket).members} == {"active"}, "both")
            standing = status(second.ticket)
            assert (standing.term, standing.generation) == (2, 1)
            assert not any(row["fate"] for row in standing.members)
            assert all(len(trainee.plans) == 1 for trainee in trainees)


def test_a_failed_script_fails_the_run_and_says_why(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running:
        heard: list[AgentDirective] = []
        agent = Credentials(Identity("agent"), running.ticket.secret, "agent")
        client = AgentClient(running.ticket, agent, heard.append, heartbeat_s=0.05)
        client.update({}, {}, False)
        with training(running.ticket, 1) as (trainee,):
            eventually(lambda: len(trainee.applied) > 2, "the run to start")
            trainee.client.post(Fail("ZeroDivisionError: division by zero"))
            assert trainee.exited.wait(20.0)
        client.update({}, {1: "exited with code 1"}, True)
        assert running.join() == FAILED
        client.close(flush_s=0.2)
    assert any(directive.over for directive in heard)
    with RunReader(tmp_path) as reader:
        assert reader.status().status == "failed"
        assert "ZeroDivisionError: division by zero" in reader.status().reason


def test_an_agent_is_told_whom_to_kill(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, silence_s=0.3, all_silent_s=0.4)) as running:
        doomed = threading.Event()
        agent = Credentials(Identity("agent"), running.ticket.secret, "agent")

        def hear(directive: AgentDirective) -> None:
            if directive.kill == (4711,):
                doomed.set()

        client = AgentClient(running.ticket, agent, hear, heartbeat_s=0.05)
        client.update({4711: ProcessVitals("T", False)}, {}, False)
        identity = Identity()
        connection = connect(running.ticket, identity)
        introduction = msgspec.structs.replace(introduction_of(identity), pid=4711)
        report = Report(identity.member, 1, 0, Phase.READY, introduction=introduction)
        connection.send("report", report, deadline=soon())
        assert doomed.wait(20.0)
        client.close()
        connection.close()


# -- those who do not behave -----------------------------------------------------------------------------------------


def test_who_does_not_read_holds_up_nobody(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=2)) as running:
        identity = Identity()
        deaf = connect(running.ticket, identity)
        # Every report is answered; at some point the answers fill the socket, and only the newest is kept.
        introduction = introduction_of(identity, model="m")
        for number in range(1, 5000):
            report = Report(identity.member, number, 0, Phase.BUILDING, introduction=introduction)
            deaf.send("report", report, deadline=soon())
        with training(running.ticket, 2, num_steps=50) as trainees:
            for trainee in trainees:
                assert trainee.exited.wait(20.0)
            bell = Bell()
            line = ControlConnection(deaf, bell)
            released = False
            while not released:
                line.wait(20.0)
                for header in line.frames():
                    body = msgspec.msgpack.decode(header.body)
                    released = released or body["verdict"] == "released"
            line.close()
            bell.close()
        assert running.join() == ENDED


def test_a_member_speaks_only_for_itself(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running, training(running.ticket, 1) as known:
        eventually(lambda: len(known[0].applied) > 2, "the run to start")
        victim = known[0].name
        liar = connect(running.ticket, Identity())
        liar.send("report", Report(victim, 10**9, 1, Phase.FAILED), deadline=soon())
        assert ends(liar)
        impostor = connect(running.ticket, Identity(victim))  # the same id, another key
        assert ends(impostor)
        identity = Identity()
        borrowed = connect(running.ticket, identity)
        introduction = introduction_of(Identity(identity.member))
        report = Report(identity.member, 1, 0, Phase.READY, introduction=introduction)
        borrowed.send("report", report, deadline=soon())
        assert ends(borrowed)
        reached = len(known[0].applied)
        eventually(lambda: len(known[0].applied) > reached + 2, "the victim to go on")
        assert [row["fate"] for row in status(running.ticket).members] == [""]


@pytest.mark.parametrize(("room", "role"), [("control", "agent"), ("agent", "worker"), ("control", "person")])
def test_a_visitor_needs_the_role_of_its_room(tmp_path: Path, room: str, role: str) -> None:
    with serving(new_config(tmp_path)) as running:
        assert ends(connect(running.ticket, Identity(), room, role))


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b"PLN1" + b"\xff" * 60],
    ids=["http", "zeros", "a frame too large"],
)
def test_garbage_closes_only_its_own_connection(tmp_path: Path, garbage: bytes) -> None:
    with serving(new_config(tmp_path)) as running, training(running.ticket, 1) as known:
        with socket.create_connection(running.ticket.address, timeout=20.0) as stranger:
            stranger.sendall(garbage)
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b""
        member = connect(running.ticket, Identity())  # one that passed the handshake
        member.socket.setblocking(True)
        member.socket.sendall(garbage)
        assert ends(member)
        odd = connect(running.ticket, Identity())
        odd.send("report", {"member": 5}, deadline=soon())
        assert ends(odd)
        eventually(lambda: len(known[0].applied) > 2, "the run to go on")


def test_without_the_secret_nobody_gets_in(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running:
        stranger = msgspec.structs.replace(running.ticket, secret=b"a guess")
        with pytest.raises(HandshakeRefused):
            status(stranger)
        other = msgspec.structs.replace(running.ticket, fingerprint=b"\0" * 32)
        with pytest.raises(HandshakeRefused, match="another certificate"):
            status(other)
        trainee = Trainee(stranger, Net())
        assert not trainee.exited.wait(0.3)
        trainee.close(flush_s=0.0)
        assert status(running.ticket).members == []


def test_only_the_newest_connection_of_a_member_counts(tmp_path: Path) -> None:
    with serving(new_config(tmp_path, wanted=2)) as running:
        identity = Identity()
        older = connect(running.ticket, identity)
        report = Report(identity.member, 1, 0, Phase.READY, introduction=introduction_of(identity, model="m"))
        older.send("report", report, deadline=soon())
        older.receive(deadline=soon())
        newer = connect(running.ticket, identity)
        assert ends(older)
        newer.send("report", msgspec.structs.replace(report, number=2), deadline=soon())
        newer.receive(deadline=soon())
        # Had the loss of the older one counted, it would not be ready any more, and the run would not start.
        with training(running.ticket, 1) as _:
            eventually(lambda: status(running.ticket).generation == 1, "the run to start with both")
        newer.close()


def test_access_file_is_for_its_owner_only(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running:
        assert (tmp_path / ACCESS_FILE).stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "run.db").stat().st_mode & 0o777 == 0o600
        access = read_access(tmp_path)
        assert access.ticket == running.ticket
        assert status(access.ticket).run == "test"
        assert running.ticket.secret.hex() not in repr(running.ticket)
        assert repr(running.ticket.secret) not in repr(running.service.config)


def test_tls_is_used_beyond_loopback(tmp_path: Path) -> None:
    config = Config.new(run="test", folder=tmp_path, settings=RunSettings(wanted=2), tls=True)
    with serving(config) as running:
        remote = msgspec.structs.replace(running.ticket, host="elsewhere")  # so that the address is used
        with training(remote, 2, num_steps=20) as trainees:
            for trainee in trainees:
                assert trainee.exited.wait(20.0)
        assert running.join() == ENDED
    with pytest.raises(ValueError, match="advertised"):
        Config.new(run="test", folder=tmp_path, settings=RunSettings(), host="0.0.0.0")


def test_a_client_reports_that_it_is_orphaned_once(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running:
        ticket = running.ticket
    calls: list[float] = []
    orphaned = threading.Event()

    def on_orphaned() -> None:
        calls.append(client.unheard_s())
        orphaned.set()

    identity = Identity()
    client = MemberClient(
        ticket,
        Member(identity.member),
        Credentials(identity, ticket.secret, "worker"),
        lambda _: None,
        on_orphaned=on_orphaned,
        orphan_s=0.2,
    )
    assert orphaned.wait(20.0)
    client.close(flush_s=0.3)
    assert len(calls) == 1
    assert calls[0] > 0.2


def test_a_closed_service_leaves_wire_errors(tmp_path: Path) -> None:
    with serving(new_config(tmp_path)) as running:
        pass
    with pytest.raises(WireError):
        status(running.ticket)


def test_checkpoints_are_taken_from_workers_of_the_run_only(tmp_path: Path) -> None:
    sizes = {"model.safetensors": 1, "state.safetensors": 1, "manifest.json": 1}
    with serving(new_config(tmp_path, wanted=2)) as running, training(running.ticket, 2) as (first, second):
        eventually(lambda: len(first.applied) > 5, "the run to start")
        stranger = connect(running.ticket, Identity(), "custody")
        with contextlib.closing(stranger), pytest.raises(CallFailed, match="no worker of this run"):
            calls.call(stranger, "hold", sizes, answer_type=type(None), deadline=soon())
        agent = connect(running.ticket, Identity(), "custody", "agent")
        with contextlib.closing(agent), pytest.raises(CallFailed, match="no operation 'hold'"):
            calls.call(agent, "hold", sizes, answer_type=type(None), deadline=soon())
        second.vanish()
        eventually(lambda: status_of(running.ticket, second.name) == "dead", "its death to be known")
        lost = connect(running.ticket, second.credentials.identity, "custody")
        with contextlib.closing(lost), pytest.raises(CallFailed, match="not in the run any more"):
            calls.call(lost, "hold", sizes, answer_type=type(None), deadline=soon())
        alive = connect(running.ticket, first.credentials.identity, "custody")
        with contextlib.closing(alive):
            calls.call(alive, "hold", sizes, answer_type=type(None), deadline=soon())
            assert len(list((tmp_path / "checkpoints").glob(".partial-*"))) == 1
        eventually(lambda: not list((tmp_path / "checkpoints").iterdir()), "nothing to be left of what was not sent")


def status_of(ticket: Ticket, member: str) -> str:
    return next(str(row["fate"]) for row in status(ticket).members if row["member"] == member)
