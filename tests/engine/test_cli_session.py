"""Whole runs: an agent, its coordinator, and workers that are members; people's commands; guests."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path

import pytest

from paceline.cli.people import pick
from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.testing.eventually import eventually
from tests.engine.commands import Command, completed, paceline, write_script


def training(folder: Path, num_steps: int, pace_s: float = 0.01, before: str = "", after: str = "") -> str:
    body = f"""
import os, sys
from tests.engine import members
{before}
verdict = members.train({num_steps}, {pace_s})
{after}
sys.exit(0 if verdict == "released" else 1)
"""
    return write_script(folder, body)


def reader_of(folder: Path, name: str = "a") -> RunReader:
    return RunReader(folder / "runs" / name)


def num_steps(folder: Path) -> int:
    with contextlib.suppress(JournalError), reader_of(folder) as reader:  # it may be made just now
        return reader.status().num_steps
    return 0


def pid_of(command: Command, member: str) -> int:
    with reader_of(command.folder) as reader:
        eventually(lambda: member in {row.member for row in reader.members()}, "the member to be written down")
        return next(row.pid for row in reader.members() if row.member == member)


def members_in(command: Command) -> list[str]:
    return [line.split()[2] for line in command.out.splitlines() if "] member " in line]


def test_a_run_goes_to_its_end_and_halts_and_resumes(tmp_path: Path) -> None:
    script = training(tmp_path, 5)
    code, out, err = completed(tmp_path, "run", "-n", "2", "--name", "a", script)
    assert code == 0, err
    assert out.count("verdict released") == 2
    with reader_of(tmp_path) as reader:
        assert reader.status().status == "ended"
    # It can go on as a new founding: what it remembers of the first one does not end it at once.
    script = training(tmp_path, 10**6)
    with paceline(tmp_path, "run", "-n", "1", "--resume", script) as command:
        eventually(lambda: "] member" in command.out, "the member to come up")
        with reader_of(tmp_path) as reader:
            eventually(lambda: len(reader.plans()) == 2, "a plan for the one that came")
        command.interrupt()
        assert command.wait() == 130
        assert "verdict released" in command.out
    with reader_of(tmp_path) as reader:
        assert reader.status().status == "interrupted"
        assert {row.fate for row in reader.members()} == {"released"}


def test_a_worker_is_killed_and_the_run_goes_on_with_its_successor(tmp_path: Path) -> None:
    script = training(tmp_path, 10**6)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", script) as command:
        eventually(lambda: num_steps(tmp_path) > 3, "the run to start")
        survivor, victim = members_in(command)
        before = pid_of(command, survivor)
        os.kill(pid_of(command, victim), signal.SIGKILL)
        eventually(lambda: len(members_in(command)) == 3, "a new worker")
        newcomer = members_in(command)[2]
        with reader_of(tmp_path) as reader:
            eventually(lambda: newcomer in reader.plans()[-1].members, "the newcomer to get a seat")
            eventually(
                lambda: {row.member: row.fate for row in reader.members()}.get(victim) == "dead",
                "the death to be written down",
            )
            assert {row.member: row.fate for row in reader.members()}[survivor] == ""
        assert pid_of(command, survivor) == before
        (coordinator,) = command.coordinators()
        os.kill(coordinator, signal.SIGKILL)
        eventually(lambda: command.coordinators() not in ([], [coordinator]), "a new coordinator")
        reached = num_steps(tmp_path)
        eventually(lambda: num_steps(tmp_path) > reached + 3, "progress under the new coordinator")
        command.kill()
        eventually(lambda: not command.processes(), "nothing to outlive the agent")
    with reader_of(tmp_path) as reader:
        assert reader.status().status == "interrupted"
    code, out, err = completed(tmp_path, "run", "--resume", training(tmp_path, 3))
    assert code == 0, err
    assert "verdict released" in out
    with reader_of(tmp_path) as reader:
        assert {row.fate for row in reader.members()} == {"dead", "released"}


def test_a_script_that_fails_everywhere_fails_the_run_with_its_traceback(tmp_path: Path) -> None:
    script = training(tmp_path, 3, before="members.inherited()\nraise ValueError('bad data')")
    code, _, err = completed(tmp_path, "run", "-n", "2", "--name", "a", script)
    assert code == 1
    assert err.splitlines()[-2:] == ["ValueError: bad data", f"logs: {tmp_path / 'runs' / 'a' / 'logs'}"]
    assert "started again" not in err.partition("w1 exited")[2].partition("w0 exited")[2]
    with reader_of(tmp_path) as reader:
        assert reader.status().status == "failed"


@pytest.mark.parametrize(
    ("after", "expected", "last"),
    [("raise OSError('cannot save')", 1, "OSError: cannot save"), ("raise SystemExit(3)", 3, "exited with code 3")],
)
def test_what_fails_after_the_run_fails_the_command_and_not_the_run(
    tmp_path: Path, after: str, expected: int, last: str
) -> None:
    script = training(tmp_path, 3, after=after)
    code, _, err = completed(tmp_path, "run", "--name", "a", script)
    assert code == expected
    assert "the run a has ended, and its training is complete; after that the script failed:" in err
    assert last in err.rpartition("after that the script failed:")[2]
    with reader_of(tmp_path) as reader:
        assert reader.status().status == "ended"


def test_people_ask_for_status_drain_logs_and_stop(tmp_path: Path) -> None:
    script = training(tmp_path, 10**6)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", script) as command:
        eventually(lambda: num_steps(tmp_path) > 3, "the run to start")
        code, out, err = completed(tmp_path, "status", "--json")
        assert code == 0, err
        assert json.loads(out)
        code, out, err = completed(tmp_path, "status")
        assert code == 0, err
        assert re.search(r"^ *[01] +w0 ", out, re.MULTILINE), out
        code, _, err = completed(tmp_path, "drain", "w7")
        assert code == 2
        assert all(member in err for member in members_in(command))
        code, out, _ = completed(tmp_path, "drain", "w1")
        assert code == 0
        eventually(lambda: "[w1] verdict released" in command.out, "w1 to leave")
        assert "[w0] verdict" not in command.out
        code, out, _ = completed(tmp_path, "logs", "w1")
        assert "verdict released" in out
        code, out, _ = completed(tmp_path, "logs")
        assert "[w0] member" in out
        with paceline(tmp_path, "logs", "-f", "w0") as follower:
            eventually(lambda: "member" in follower.out, "the log")
            assert completed(tmp_path, "stop")[0] == 0
            assert command.wait() == 0
            assert follower.wait() == 0
            assert "verdict released" in follower.out
    code, _, err = completed(tmp_path, "stop")
    assert code == 2
    assert "runs there: a" in err
    code, out, _ = completed(tmp_path, "logs", "w0")  # of the newest run
    assert code == 0
    assert "verdict released" in out


def test_guests_join_and_leave(tmp_path: Path) -> None:
    script = training(tmp_path, 10**6)
    with paceline(tmp_path, "run", "--name", "a", script) as command:
        eventually(lambda: num_steps(tmp_path) > 3, "the run to start")
        code, invitation, err = completed(tmp_path, "invite", "--for", "10m", "--uses", "2")
        assert code == 0
        assert "this machine only" in err
        (tmp_path / "code").write_text(invitation)
        with paceline(tmp_path, "join", "@code", "-n", "1", script) as guest:
            eventually(lambda: bool(members_in(guest)), "the guest's member")
            with reader_of(tmp_path) as reader:
                eventually(lambda: len(reader.plans()[-1].members) == 2, "the guest's seat")
            guest.interrupt()
            # Workers of these tests know no SIGTERM: it ends them.
            assert guest.wait() == 130
            assert (tmp_path / "runs" / "a-2" / "logs" / "w0.log").exists()
        assert "verdict" not in command.out
        with paceline(tmp_path, "join", invitation.strip(), script) as guest:
            eventually(lambda: bool(members_in(guest)), "the guest's member")
            with reader_of(tmp_path) as reader:
                eventually(lambda: members_in(guest)[0] in reader.plans()[-1].members, "the guest's seat")
            command.interrupt()
            assert command.wait() == 130
            assert guest.wait() == 0
    code, _, err = completed(tmp_path, "join", invitation.strip(), script)
    assert code == 2
    assert err.count("\n") == 1


@pytest.mark.parametrize("code", ["nonsense", "paceline-join1:cutoff", "@nofile"])
def test_a_wrong_invitation_is_refused_in_one_line(tmp_path: Path, code: str) -> None:
    result, out, err = completed(tmp_path, "join", code, "-n", "2", write_script(tmp_path, ""))
    assert (result, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_commands_without_a_run_say_so(tmp_path: Path) -> None:
    for words in (["status"], ["stop"], ["invite"], ["drain", "w0"], ["logs"]):
        code, _, err = completed(tmp_path, *words)
        assert code == 2
        assert "no run is going on" in err


def test_members_are_picked_by_label_rank_and_prefix() -> None:
    members = [("aab1", "worker", 0, 7), ("aac2", "worker", 1, 9), ("aad3", "server", -1, 8)]
    rows = [{"member": name, "role": role, "rank": rank, "pid": pid} for name, role, rank, pid in members]
    pids = {"w0": [5, 9], "w1": [7], "s0": [8]}
    assert pick("s0", rows, pids)["member"] == "aad3"
    assert pick("w0", rows, pids)["member"] == "aac2"
    assert pick("0", rows, pids)["member"] == "aab1"
    assert pick("aab", rows, pids)["member"] == "aab1"
    for wanted in ("aa", "w5", "7", "", "b"):
        with pytest.raises(
            ValueError, match=r"members are: aab1 \(rank 0, w1\), aac2 \(rank 1, w0\), aad3 \(server, s0\)"
        ):
            pick(wanted, rows, pids)
