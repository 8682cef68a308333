"""Checkpoints and logs of other hosts reach the run's folder: complete or absent, whatever breaks on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.checkpoint import CheckpointWriter, SaveStage, find, read, write
from paceline.checkpoint.pending import Pending
from paceline.checkpoint.stores import DistantStore
from paceline.custody import depot as depots
from paceline.custody.custodian import Custodian, LogPiece, Shared
from paceline.custody.depot import Depot
from paceline.custody.moving import CustodyError
from paceline.custody.partial import PREFIX, Partial
from paceline.custody.shelf import RetentionRules
from paceline.errors import AddressError, CallFailed, ConnectionLost, Evicted, WireError
from paceline.testing import faults
from paceline.train.saving import Checkpoints, Saver
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.handshake import Visitor
from tests.checkpoint.samples import assert_same, contents

WAIT_S = 20.0
FILE_BYTES = 400  # what is longer than that on the wire is a piece of a file


class Host:
    """The run's host in this process; every visitor is served on a thread. `refusal` says why nobody may bring any."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.refusal = ""
        self.is_down = False
        self.num_unanswered = 0  # so many visits more
        self.num_visits = 0
        self._ends: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._custodian = Custodian(folder, lambda _: self.refusal)

    def connect(self, role: str) -> Connection:
        if self.is_down or self.num_unanswered:
            self.num_unanswered -= not self.is_down
            raise AddressError("nobody there")
        self.num_visits += 1
        mine, theirs = socket.socketpair()
        here, there = Connection(mine, peer="the run's host"), Connection(theirs, peer=role)
        visitor = Visitor(member="m1", role=role, fingerprint=b"", purpose="custody")

        def serve() -> None:
            with contextlib.suppress(WireError), contextlib.closing(there):
                self._custodian.serve(there, visitor)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        self._threads.append(thread)
        self._ends.append(there)
        return here

    def hang_up(self) -> None:
        """As the death of the coordinator does."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        self._ends.clear()

    def depot(self, role: str = "worker", retry_s: float = WAIT_S) -> Depot:
        return Depot(lambda _: self.connect(role), retry_s=retry_s)

    def operations(self) -> list[int]:
        return [found.operation for found in find(self.checkpoints)]

    def partials(self) -> list[Path]:
        return list(self.checkpoints.glob(f"{PREFIX}*"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    made = Host(tmp_path / "head")
    made.folder.mkdir()
    return made


@contextlib.contextmanager
def keeping(host: Host, retry_s: float = WAIT_S) -> Iterator[CheckpointWriter]:
    """A keeper on another host."""
    guest = host.folder.parent / "guest"

    def make(rules: RetentionRules) -> DistantStore:
        return DistantStore(guest, host.depot(retry_s=retry_s), rules)

    with CheckpointWriter(guest, keep_last=2, make_store=make) as made:
        yield made


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(depots, "PAUSE_S", 0.02)
    monkeypatch.setattr(depots, "SLICE_S", 0.005)


def publish(keeper: CheckpointWriter, operation: int) -> SaveStage:
    assert keeper.wait_free(WAIT_S)
    pending = keeper.take(contents(operation))
    assert pending is not None
    keeper.settle(operation)
    return pending.wait(WAIT_S)


def lose_before_it_counts(keeper: CheckpointWriter, host: Host, operation: int) -> Pending:
    """The checkpoint was sent, and the connection to the run's host breaks before its step counts."""
    pending = keeper.take(contents(operation))
    assert pending is not None
    assert pending.wait_written(WAIT_S)
    host.hang_up()
    assert not host.partials()
    keeper.settle(operation)
    return pending


@contextlib.contextmanager
def lost_in_middle_of_sending(host: Host) -> Iterator[None]:
    """The run's host hangs up once, when one file of a checkpoint has gone and the next is about to."""
    is_done = threading.Event()

    def lose() -> None:
        is_done.set()
        host.hang_up()

    second = faults.nth(2, lose)
    with faults.traffic(lambda num_bytes: second() if num_bytes >= FILE_BYTES else None):
        yield
    assert is_done.is_set()


# -- bringing --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_host_is_published_at_the_runs_host(host: Host, tmp_path: Path) -> None:
    with keeping(host) as keeper:
        for operation in (3, 5, 8):
            assert publish(keeper, operation) is SaveStage.PUBLISHED
        assert host.operations() == [8, 5]
        assert_same(read(host.checkpoints / "latest"), contents(8))
        assert not list((tmp_path / "guest").iterdir())
        assert not host.partials()


def test_it_has_no_name_before_its_step_counts(host: Host) -> None:
    with keeping(host) as keeper:
        pending = keeper.take(contents(4))
        assert pending is not None
        assert pending.wait_written(WAIT_S)
        assert (host.operations(), len(host.partials())) == ([], 1)
        keeper.settle(4)
        assert pending.wait(WAIT_S) is SaveStage.PUBLISHED
        assert (host.operations(), host.partials()) == ([4], [])


def test_scores_are_kept_at_the_runs_host(host: Host) -> None:
    with keeping(host) as keeper:
        for operation, score in ((1, 0.5), (2, 0.9), (3, 0.8), (4, 0.7)):
            assert keeper.wait_free(WAIT_S)
            pending = keeper.take(contents(operation))
            assert pending is not None
            assert keeper.score(operation, score)
            keeper.settle(operation)
            assert pending.wait(WAIT_S) is SaveStage.PUBLISHED
        assert host.operations() == [4, 3, 1]
        assert_same(read(host.checkpoints / "best"), contents(1))


def test_a_coordinator_that_dies_in_the_middle_gets_it_again(host: Host) -> None:
    with lost_in_middle_of_sending(host), keeping(host) as keeper:
        assert publish(keeper, 6) is SaveStage.PUBLISHED
        assert_same(read(host.checkpoints / "latest"), contents(6))
        assert not host.partials()


def test_a_coordinator_that_dies_before_the_step_counts_gets_it_again(host: Host) -> None:
    with keeping(host) as keeper:
        assert lose_before_it_counts(keeper, host, 6).wait(WAIT_S) is SaveStage.PUBLISHED
        assert_same(read(host.checkpoints / "latest"), contents(6))


def test_a_worker_that_dies_in_the_middle_leaves_nothing(host: Host, tmp_path: Path) -> None:
    write(tmp_path, contents(6))
    connection = host.connect("worker")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "step-000000006-op-6").iterdir()}
    deadline = Deadline(WAIT_S, "a test")
    calls.call(connection, "hold", sizes, answer_type=type(None), deadline=deadline)
    connection.send("call", calls.CallBody("fill", b"\xc0"), deadline=deadline)  # type: ignore[arg-type]
    connection.send_all([memoryview(b"x" * 100)], deadline)
    assert len(host.partials()) == 1
    connection.close()
    host.hang_up()
    assert (host.operations(), host.partials()) == ([], [])


def test_bytes_that_change_on_the_way_are_not_published(host: Host) -> None:
    with faults.damaged(FILE_BYTES), keeping(host) as keeper:
        assert publish(keeper, 6) is SaveStage.FAILED
        assert "checksums differ" in str(keeper.errors()[-1].error)
        assert (host.operations(), host.partials()) == ([], [])


def test_a_runs_host_that_is_not_reached_fails_one_checkpoint_and_the_next_is_tried(host: Host, tmp_path: Path) -> None:
    with keeping(host, retry_s=0.1) as keeper:
        host.is_down = True
        assert publish(keeper, 2) is SaveStage.FAILED
        assert "not reached for 0.1 s" in str(keeper.errors()[-1].error)
        host.is_down = False
        assert publish(keeper, 4) is SaveStage.PUBLISHED
    assert not list((tmp_path / "guest").iterdir())


def test_who_is_not_in_the_run_any_more_brings_nothing(host: Host) -> None:
    with keeping(host) as keeper:
        host.refusal = "worker m1 is not in the run any more"
        assert publish(keeper, 2) is SaveStage.FAILED
        assert "not in the run any more" in str(keeper.errors()[-1].error)
        assert host.operations() == []


def test_a_runs_host_without_room_says_so(host: Host) -> None:
    with keeping(host) as keeper, faults.full_disk(host.folder):
        assert publish(keeper, 2) is SaveStage.FAILED
        error = str(keeper.errors()[-1].error)
        assert str(host.checkpoints) in error
        assert "0 are free" in error


def test_closing_while_the_runs_host_is_away_does_not_hang(host: Host) -> None:
    with keeping(host) as keeper:
        pending = keeper.take(contents(6))
        assert pending is not None
        assert pending.wait_written(WAIT_S)
        host.is_down = True
        host.hang_up()
        keeper.settle(6)
        keeper.close(wait_s=0.2)
        assert pending.stage in (SaveStage.DROPPED, SaveStage.FAILED)


# -- a full disk here ------------------------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path) -> Iterator[None]:
    """No checkpoint can be written on the host of the worker."""
    with faults.full_disk(tmp_path / "guest", 7):
        yield


@pytest.mark.usefixtures("full")
def test_a_full_disk_of_another_host_does_not_keep_checkpoints_from_the_runs_host(
    host: Host, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with keeping(host) as keeper:
        for operation in (3, 5, 8):
            assert publish(keeper, operation) is SaveStage.PUBLISHED
        assert host.operations() == [8, 5]
        assert_same(read(host.checkpoints / "latest"), contents(8))
        assert not list((tmp_path / "guest").iterdir())
    assert caplog.text.count("sent to the run's host without a copy here") == 1


def test_a_folder_that_cannot_be_made_here_does_not_either(host: Host, tmp_path: Path) -> None:
    (tmp_path / "guest").write_text("in its place")
    with keeping(host) as keeper:
        assert publish(keeper, 3) is SaveStage.PUBLISHED
    assert_same(read(host.checkpoints / "latest"), contents(3))


@pytest.mark.usefixtures("full")
def test_what_is_only_in_memory_is_sent_again_if_the_connection_breaks(host: Host) -> None:
    with lost_in_middle_of_sending(host), keeping(host) as keeper:
        assert publish(keeper, 3) is SaveStage.PUBLISHED
    assert_same(read(host.checkpoints / "latest"), contents(3))


@pytest.mark.usefixtures("full")
def test_what_was_only_in_memory_and_is_lost_before_its_step_counts_is_never_something_else(host: Host) -> None:
    """The memory is that of the next snapshot by then."""
    with keeping(host) as keeper:
        pending = lose_before_it_counts(keeper, host, 3)
        assert pending.wait(WAIT_S) is SaveStage.FAILED
        assert "no room to keep a copy here" in str(pending.error)
        assert publish(keeper, 5) is SaveStage.PUBLISHED
        assert host.operations() == [5]


# -- fetching --------------------------------------------------------------------------------------------------------


def saver_of(host: Host, tmp_path: Path, told: list[str]) -> Saver:
    def tell(kind: str, text: str) -> None:
        told.append(f"{kind}: {text}")

    own = tmp_path / "guest" / "checkpoints"
    return Saver(Checkpoints(), own, tell, own=own, depot=host.depot())


def test_a_founder_on_another_host_starts_from_the_checkpoint_of_the_runs_host(host: Host, tmp_path: Path) -> None:
    told: list[str] = []
    saver = saver_of(host, tmp_path, told)
    assert saver.newest_name() == -1
    for operation in (3, 6, 9):
        write(host.checkpoints, contents(operation))
    assert saver.newest_name() == 9
    assert_same(saver.read(6), contents(6))
    saver.abandon_after(6)
    assert host.operations() == [6, 3]
    assert told == ["skipped checkpoint: operation 9: the run starts again from 6"]
    assert not list((tmp_path / "guest" / "checkpoints").iterdir())


def test_a_bad_one_is_put_aside_at_the_runs_host(host: Host, tmp_path: Path) -> None:
    told: list[str] = []
    saver = saver_of(host, tmp_path, told)
    for operation in (3, 6):
        write(host.checkpoints, contents(operation))
    (host.checkpoints / "step-000000006-op-6" / "model.safetensors").write_bytes(b"bad")
    newest = saver.newest()
    assert newest is not None
    assert_same(newest, contents(3))
    assert host.operations() == [3]
    assert "operation 6" in told[0]


def test_a_host_that_does_not_answer_at_first_is_not_taken_for_one_without_checkpoints(
    host: Host, tmp_path: Path
) -> None:
    """Else a worker that is the last one would begin the run anew, and put all that is there aside."""
    write(host.checkpoints, contents(3))
    host.num_unanswered = 2
    assert saver_of(host, tmp_path, []).newest_name() == 3
    host.is_down = True
    own = tmp_path / "guest"
    saver = Saver(Checkpoints(), own, lambda *_: None, own=own, depot=host.depot(retry_s=0.1))
    with pytest.raises(CustodyError, match="the run's host was not reached"):
        saver.newest_name()


def test_a_host_that_is_away_makes_no_checkpoint_a_bad_one(host: Host, tmp_path: Path) -> None:
    told: list[str] = []
    own = tmp_path / "guest"
    saver = Saver(Checkpoints(), own, lambda kind, text: told.append(kind), own=own, depot=host.depot(retry_s=0.1))
    write(host.checkpoints, contents(3))
    assert saver.newest_name() == 3
    host.is_down = True
    host.hang_up()
    with pytest.raises(Evicted, match="cannot be had"):
        saver.read(3)
    assert saver.newest_name() == 3
    assert (host.operations(), told) == ([3], [])


def test_one_that_is_removed_while_it_is_fetched_is_complete_all_the_same(host: Host, tmp_path: Path) -> None:
    write(host.checkpoints, contents(3))
    connection = host.connect("worker")
    deadline = Deadline(WAIT_S, "a test")
    sizes = calls.call(connection, "open", 3, answer_type=dict[str, int], deadline=deadline)
    (host.checkpoints / "step-000000003-op-3").rename(host.checkpoints / "away")
    for path in (host.checkpoints / "away").iterdir():
        path.unlink()
    partial = Partial(tmp_path)
    depots._receive_files(connection, sizes, partial)
    assert_same(read(partial.path), contents(3))
    partial.remove()
    connection.close()


def test_training_does_not_stand_still_with_the_runs_host(host: Host, tmp_path: Path) -> None:
    """A checkpoint with a score waits for an older one that gets on, not for a host that is not heard of."""
    own = tmp_path / "guest"
    told: list[str] = []
    saver = Saver(Checkpoints(), own, lambda kind, _: told.append(kind), own=own, depot=host.depot(retry_s=WAIT_S))
    saver.is_quiet = lambda: host.is_down
    host.is_down = True
    host.hang_up()
    saver.take(contents(3))
    began = time.monotonic()
    saver.take(contents(4), score=0.5)
    assert time.monotonic() - began < WAIT_S / 2
    assert told == ["skipped"]
    host.is_down = False
    saver.take(contents(5), score=0.4)
    saver.publish(5)
    saver.close()
    assert host.operations()[0] == 5


# -- folders that a script chose -------------------------------------------------------------------------------------


def test_a_folder_that_both_hosts_share_needs_no_copy(host: Host, tmp_path: Path) -> None:
    shared = tmp_path / "nfs" / "mine"
    settings = Checkpoints(folder=shared)
    saver = Saver(settings, shared, lambda *_: None, own=tmp_path / "guest", depot=host.depot())
    saver.take(contents(4), wait=True)
    saver.publish(4)
    saver.close()
    assert [found.operation for found in find(shared)] == [4]
    assert host.operations() == []
    assert not list(shared.glob(".paceline-mark*"))


class DepotOfAnotherDisk(Depot):
    def shares(self, folder: Path) -> bool:
        return False


def test_a_folder_that_only_this_host_has_is_not_where_checkpoints_end(host: Host, tmp_path: Path) -> None:
    """On the run's host its workers look for them beside their own."""
    depot = DepotOfAnotherDisk(lambda _: host.connect("worker"), retry_s=WAIT_S)
    mine = tmp_path / "mine"
    saver = Saver(Checkpoints(folder=mine), mine, lambda *_: None, own=tmp_path / "guest", depot=depot)
    saver.take(contents(4), wait=True)
    saver.publish(4)
    saver.close()
    assert (find(mine), host.operations()) == ([], [4])
    write(tmp_path / "heads own", contents(3))
    settings = Checkpoints(folder=tmp_path / "heads own")
    there = Saver(settings, tmp_path / "heads own", lambda *_: None, own=host.checkpoints)
    assert there.newest_name() == 4
    assert_same(there.read(4), contents(4))
    newest = there.newest()
    assert newest is not None
    assert newest.operation == 4
    there.abandon_after(3)
    assert host.operations() == []


def test_the_question_of_sharing_tells_of_nothing_but_ones_own_mark(host: Host, tmp_path: Path) -> None:
    depot = host.depot()
    (tmp_path / "secret").write_text("x")
    with pytest.raises(CustodyError, match="no name of a mark"):
        depot.ask("shares", Shared(str(tmp_path), "secret", "x"), bool)
    (tmp_path / ".paceline-mark-0123456789abcdef").symlink_to(tmp_path / "secret")
    assert not depot.ask("shares", Shared(str(tmp_path), ".paceline-mark-0123456789abcdef", "x"), bool)
    depot.close()


# -- logs ------------------------------------------------------------------------------------------------------------


def test_logs_are_appended_where_they_end_and_nowhere_else(host: Host) -> None:
    depot = host.depot("agent")

    def append(offset: int, data: bytes, name: str = "w0.log") -> int:
        return depot.ask("append", LogPiece("box-1", name, offset, data), int)

    assert append(0, b"") == 0
    assert append(0, b"one\n") == 4
    assert append(0, b"one\n") == 4  # said again: its answer was lost
    assert append(8, b"later") == 4  # between them something is missing
    assert append(4, b"two\n") == 8
    log = host.folder / "logs" / "joined" / "box-1" / "w0.log"
    assert log.read_bytes() == b"one\ntwo\n"
    assert log.stat().st_mode & 0o777 == 0o600
    depot.close()


@pytest.mark.parametrize(("folder", "name"), [("..", "w0.log"), ("a/b", "w0.log"), ("a", "../w0.log"), ("a", "run.db")])
def test_no_name_leads_out_of_the_folder_of_logs(host: Host, folder: str, name: str) -> None:
    depot = host.depot("agent")
    with pytest.raises(CustodyError, match="no name of a log"):
        depot.ask("append", LogPiece(folder, name, 0, b"x"), int)
    assert not (host.folder / "logs").exists()
    depot.close()


def test_an_agent_brings_logs_only(host: Host) -> None:
    connection = host.connect("agent")
    with pytest.raises(CallFailed, match="no operation 'hold'"):
        calls.call(connection, "hold", {}, answer_type=type(None), deadline=Deadline(WAIT_S, "a test"))
    connection.close()


def test_what_is_no_checkpoint_is_refused(host: Host) -> None:
    connection = host.connect("worker")
    for sizes in ({}, {"model.safetensors": 3}, {"../x": 1, "state.safetensors": 1, "manifest.json": 1}):
        with pytest.raises(CallFailed, match="not the files of a checkpoint"):
            calls.call(connection, "hold", sizes, answer_type=type(None), deadline=Deadline(WAIT_S, "a test"))
    with pytest.raises(CallFailed, match="no checkpoint of operation 5"):
        calls.call(
            connection,
            "publish",
            {"step": 5, "operation": 5, "checksums": {}},
            answer_type=type(None),
            deadline=Deadline(WAIT_S, "a test"),
        )
    connection.send("call", calls.CallBody("fill", b"\xc0"), deadline=Deadline(WAIT_S, "a test"))  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost):
        connection.receive(deadline=Deadline(WAIT_S, "a test"))
    connection.close()
    assert not host.partials()
