"""Checkpoints beside training: published when written and settled, kept by rule, errors that training survives."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.checkpoint import CheckpointWriter, Contents, Pending, SaveStage, files, find, newest_good, read
from paceline.checkpoint.snapshot import SnapshotBuffers, TensorCopy, divide
from paceline.checkpoint.stores import LocalStore
from paceline.custody.partial import PREFIX, Partial, sweep
from paceline.custody.shelf import SCORES, RetentionRules, choose
from paceline.errors import CheckpointError
from paceline.testing import faults
from paceline.testing.crew import Crew, say
from paceline.testing.eventually import eventually
from tests.checkpoint.samples import assert_same, contents

WAIT_S = 20.0
Make = Callable[..., CheckpointWriter]


class Gate:
    """Holds the background writing between two pieces."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.opened.set()
        self.num_passed = 0
        self.closes_again = False

    def open_once(self) -> None:
        """Let one piece through."""
        self.closes_again = True
        self.opened.set()

    def close(self) -> None:
        self.opened.clear()
        self.reached.clear()

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(WAIT_S)
        self.num_passed += 1
        if self.closes_again:
            self.closes_again = False
            self.opened.clear()


class GatedStore(LocalStore):
    def __init__(self, folder: Path, gate: Gate, rules: RetentionRules) -> None:
        super().__init__(folder, rules)
        self._gate = gate

    def write(self, prepared: files.Prepared, between: Callable[[], None]) -> Partial:
        def step() -> None:
            self._gate.pass_through()
            between()

        return super().write(prepared, step)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def make(tmp_path: Path, gate: Gate) -> Make:
    return partial(CheckpointWriter, tmp_path, make_store=partial(GatedStore, tmp_path, gate))


def take(keeper: CheckpointWriter, given: Contents) -> Pending:
    assert keeper.wait_free(WAIT_S)
    pending = keeper.take(given)
    assert pending is not None
    return pending


def publish(keeper: CheckpointWriter, operation: int) -> None:
    pending = take(keeper, contents(operation))
    keeper.settle(operation)
    assert pending.wait(WAIT_S) is SaveStage.PUBLISHED


def operations(folder: Path) -> list[int]:
    return [found.operation for found in find(folder)]


def partials(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


# -- publication -----------------------------------------------------------------------------------------------------


def test_a_written_one_is_published_when_it_is_settled(make: Make, tmp_path: Path) -> None:
    with make() as keeper:
        pending = take(keeper, contents(5))
        assert pending.wait_written(WAIT_S)
        assert pending.stage is SaveStage.WRITTEN
        keeper.settle(4)
        assert operations(tmp_path) == []
        keeper.settle(5)
        assert pending.wait(WAIT_S) is SaveStage.PUBLISHED
        assert_same(read(pending.path), contents(5))
        assert_same(read(tmp_path / "latest"), contents(5))
        assert partials(tmp_path) == []


def test_a_settled_one_is_published_when_it_is_written(make: Make, gate: Gate, tmp_path: Path) -> None:
    with make() as keeper:
        gate.close()
        pending = take(keeper, contents(5))
        keeper.settle(6)
        assert gate.reached.wait(WAIT_S)
        assert (pending.stage, operations(tmp_path)) == (SaveStage.WRITING, [])
        gate.opened.set()
        assert pending.wait(WAIT_S) is SaveStage.PUBLISHED


def test_one_is_published_while_the_next_is_written(make: Make, gate: Gate, tmp_path: Path) -> None:
    with make() as keeper:
        first = take(keeper, contents(1))
        assert first.wait_written(WAIT_S)
        gate.close()
        second = take(keeper, contents(2))
        assert gate.reached.wait(WAIT_S)
        keeper.settle(1)
        gate.open_once()
        assert first.wait(WAIT_S) is SaveStage.PUBLISHED
        assert second.stage is SaveStage.WRITING
        assert operations(tmp_path) == [1]
        gate.opened.set()
        assert second.wait_written(WAIT_S)


def test_the_snapshot_is_of_the_moment_of_take(make: Make, gate: Gate) -> None:
    with make() as keeper:
        for operation in (1, 2):  # the second time in memory that was used before
            live = contents(operation)
            gate.close()
            pending = take(keeper, live)
            for tensor in live.model.values():
                tensor.zero_()
            live.state["optimizer"]["state"][0]["avg"].zero_()
            live.state["optimizer"]["state"].clear()
            gate.opened.set()
            keeper.settle(operation)
            assert pending.wait(WAIT_S) is SaveStage.PUBLISHED
            assert_same(read(pending.path), contents(operation))


def test_a_discarded_one_is_never_seen(make: Make, gate: Gate, tmp_path: Path) -> None:
    events: list[str] = []
    with make(on_event=lambda kind, text: events.append(kind)) as keeper:
        written = take(keeper, contents(5))
        assert written.wait_written(WAIT_S)
        gate.close()
        being_written = take(keeper, contents(6))
        assert gate.reached.wait(WAIT_S)
        keeper.discard(4)
        before = gate.num_passed
        gate.opened.set()
        assert written.wait(WAIT_S) is being_written.wait(WAIT_S) is SaveStage.DROPPED
        assert gate.num_passed == before + 1  # nothing more was written
        keeper.settle(4)
        publish(keeper, 6)  # done again, and this time it counts
        assert operations(tmp_path) == [6]
        assert partials(tmp_path) == []
        assert events == ["dropped", "dropped", "published"]


def test_a_settled_one_cannot_be_discarded(make: Make) -> None:
    with make() as keeper:
        keeper.settle(5)
        keeper.discard(5)
        with pytest.raises(ValueError, match="up to 5 are settled"):
            keeper.discard(4)


def test_one_snapshot_at_a_time(make: Make, gate: Gate, tmp_path: Path) -> None:
    events: list[str] = []
    with make(on_event=lambda kind, text: events.append(f"{kind}: {text}")) as keeper:
        gate.close()
        first = take(keeper, contents(1))
        assert keeper.take(contents(2)) is None
        assert not keeper.wait_free(0.01)
        assert keeper.take(contents(2)) is None
        assert events == ["skipped: operation 2: the checkpoint of 1 is still being written"] * 2
        with pytest.raises(ValueError, match="operation 1 has a snapshot already"):
            keeper.take(contents(1))
        threading.Timer(0.01, gate.opened.set).start()
        second = take(keeper, contents(2))
        keeper.settle(2)
        assert first.wait(WAIT_S) is second.wait(WAIT_S) is SaveStage.PUBLISHED
        assert operations(tmp_path) == [2, 1]


def test_what_cannot_be_saved_is_told_to_the_caller(make: Make) -> None:
    with make() as keeper:
        with pytest.raises(TypeError, match=r"hooks\[0\]"):
            keeper.take(contents(1, state={"hooks": [print]}))
        publish(keeper, 1)


# -- errors ----------------------------------------------------------------------------------------------------------


def test_on_a_full_disk_a_snapshot_is_kept_and_written_when_there_is_room(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.checkpoint.writer.ROOM_S", 0.01)
    events: list[str] = []
    with make(on_event=lambda kind, text: events.append(f"{kind}: {text}")) as keeper:
        publish(keeper, 1)
        with faults.full_disk(tmp_path, 10):
            older = take(keeper, contents(2))
            eventually(lambda: older.waits_for_room, "it waits for room")
            newer = take(keeper, contents(3))
            assert older.wait(WAIT_S) is SaveStage.DROPPED, "the newer one takes its place"
            eventually(lambda: newer.waits_for_room, "it waits for room")
        keeper.settle(3)
        assert newer.wait(WAIT_S) is SaveStage.PUBLISHED
        said = [text for text in events if text.startswith("waits: ")]
        assert [text.partition(" is kept")[0] for text in said] == ["waits: operation 2", "waits: operation 3"]
        assert "no room for a checkpoint in" in said[0]
        assert "10 are free" in said[0]
        assert operations(tmp_path) == [3, 1]


def test_a_disk_that_stays_full_does_not_hold_up_the_end(make: Make, tmp_path: Path) -> None:
    keeper = make()
    with faults.full_disk(tmp_path, 10):
        pending = take(keeper, contents(2))
        keeper.settle(2)
        eventually(lambda: pending.waits_for_room, "it waits for room")
        keeper.close(wait_s=0.1)
    assert pending.stage is SaveStage.DROPPED


def test_a_folder_that_vanishes_is_an_error_of_the_background(make: Make, tmp_path: Path) -> None:
    with make() as keeper:
        tmp_path.rmdir()
        assert take(keeper, contents(2)).wait(WAIT_S) is SaveStage.FAILED
        tmp_path.mkdir()
        publish(keeper, 3)


def test_a_callback_that_raises_changes_nothing(make: Make, tmp_path: Path) -> None:
    def complain(kind: str, text: str) -> None:
        raise RuntimeError(kind)

    with make(on_event=complain) as keeper:
        publish(keeper, 1)
        publish(keeper, 2)
        assert operations(tmp_path) == [2, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"keep_last": 0}, "keep_last=0"), ({"keep_best": -1}, "keep_best=-1")],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CheckpointWriter(tmp_path, **options)


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="give a folder"):
        CheckpointWriter(tmp_path / "file" / "run")


# -- what stays ------------------------------------------------------------------------------------------------------


def test_the_last_and_the_best_stay(make: Make, tmp_path: Path) -> None:
    with make(keep_last=2, keep_best=1) as keeper:
        for operation, loss in [(1, 0.5), (2, 0.1), (3, 0.7), (4, float("nan")), (5, 0.1)]:
            assert not keeper.score(operation, 0.0)  # there is no such checkpoint yet
            pending = take(keeper, contents(operation))
            assert keeper.score(operation, loss) is not math.isnan(loss)
            keeper.settle(operation)
            assert pending.wait(WAIT_S) is SaveStage.PUBLISHED
        keeper.close()
        assert operations(tmp_path) == [5, 4, 2]
        assert os.readlink(tmp_path / "latest") == "step-000000005-op-5"
        assert os.readlink(tmp_path / "best") == "step-000000002-op-2"
        assert partials(tmp_path) == []


def test_scores_outlive_the_process_and_may_come_late(make: Make, tmp_path: Path) -> None:
    with make(keep_last=1) as keeper:
        publish(keeper, 1)
        keeper.score(1, 0.2)
        keeper.close()
        assert os.readlink(tmp_path / "best") == "step-000000001-op-1"
    with make(keep_last=1) as keeper:
        publish(keeper, 2)
        keeper.score(2, 0.3)
        publish(keeper, 3)
        assert operations(tmp_path) == [3, 1]
        publish(keeper, 1)  # another one of this operation: the score was not its own
        keeper.close()
        assert operations(tmp_path) == [3]
        assert not (tmp_path / "best").is_symlink()


def test_scores_that_cannot_be_read_are_none(make: Make, tmp_path: Path) -> None:
    (tmp_path / SCORES).write_text('{"1": "high"')
    with make() as keeper:
        publish(keeper, 1)
        assert operations(tmp_path) == [1]


@given(
    st.sets(st.integers(0, 20)), st.dictionaries(st.integers(0, 20), st.floats()), st.integers(1, 4), st.integers(0, 3)
)
def test_the_rules(there: set[int], scores: dict[int, float], keep_last: int, keep_best: int) -> None:
    keep, latest, best = choose(there, scores, RetentionRules(keep_last, keep_best))
    assert set(sorted(there)[-keep_last:]) <= keep <= there
    assert len(keep) <= keep_last + keep_best
    assert latest == max(there, default=None)
    finite = {one: scores[one] for one in there if one in scores and abs(scores[one]) < float("inf")}
    if finite and keep_best:
        assert best in keep
        assert finite[best] == min(finite.values())
    else:
        assert best is None


# -- begin and end ---------------------------------------------------------------------------------------------------


def test_what_a_dead_writer_left_is_removed_at_the_start(make: Make, tmp_path: Path) -> None:
    (tmp_path / f"{PREFIX}dead").mkdir()
    make().close()
    assert partials(tmp_path) == []


def test_what_a_living_keeper_writes_is_left_alone(make: Make, tmp_path: Path) -> None:
    with make() as keeper:
        pending = take(keeper, contents(1))
        assert pending.wait_written(WAIT_S)
        make().close()
        keeper.settle(1)
        assert pending.wait(WAIT_S) is SaveStage.PUBLISHED


def keep_until_killed(_: object, folder: Path) -> None:
    with CheckpointWriter(folder, keep_last=2) as keeper:
        begin = max([0, *operations(folder)])
        for operation in range(begin + 1, begin + 10_000):
            assert keeper.take(contents(operation)) is not None
            pending = take(keeper, contents(operation + 100_000))  # never settled
            keeper.settle(operation)
            keeper.score(operation, 1 / operation)
            assert pending.wait_written(WAIT_S)
            keeper.discard(operation)
            assert pending.wait(WAIT_S) is SaveStage.DROPPED
            say(operation)


def test_a_kill_at_any_moment_leaves_good_checkpoints(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(5):
        with Crew(1, form=False) as crew:
            crew.start(keep_until_killed, tmp_path)
            heard = [crew.hear(0) for _ in range(chance.randrange(1, 20))]
            crew.kill(0)
            crew.processes[0].join(WAIT_S)
        found, skipped = newest_good(tmp_path)
        assert found is not None
        assert found.operation >= heard[-1]
        assert skipped == []
        for one in find(tmp_path):
            assert_same(read(one.path), contents(one.operation))
        assert (tmp_path / "latest").is_dir()
        assert (tmp_path / "best").is_dir()
    sweep(tmp_path)
    assert partials(tmp_path) == []


def test_close_finishes_what_is_settled_and_drops_the_rest(make: Make, gate: Gate, tmp_path: Path) -> None:
    with make() as keeper:
        first = take(keeper, contents(1))
        assert first.wait_written(WAIT_S)
        gate.close()
        second = take(keeper, contents(2))
        keeper.settle(1)
        threading.Timer(0.01, gate.opened.set).start()
        keeper.close(WAIT_S)
        assert (first.stage, second.stage) == (SaveStage.PUBLISHED, SaveStage.DROPPED)
        assert (operations(tmp_path), partials(tmp_path)) == ([1], [])
        assert keeper.buffer_bytes == 0
        keeper.close()
        with pytest.raises(CheckpointError, match="closed"):
            keeper.take(contents(3))


def open_when_unwanted(gate: Gate, pending: Pending) -> None:
    with pending._changed:
        pending._changed.wait_for(lambda: pending.is_unwanted, WAIT_S)
    gate.opened.set()


def test_close_does_not_wait_longer_than_it_may(make: Make, gate: Gate, tmp_path: Path) -> None:
    with make() as keeper:
        gate.close()
        pending = take(keeper, contents(1))
        keeper.settle(1)
        assert gate.reached.wait(WAIT_S)
        threading.Thread(target=open_when_unwanted, args=(gate, pending)).start()
        keeper.close(0.01)
        assert pending.stage is SaveStage.DROPPED
        assert partials(tmp_path) == []


def test_a_forked_child_has_no_keeper(make: Make, gate: Gate) -> None:
    with make() as keeper:
        gate.close()
        take(keeper, contents(1))
        child = os.fork()
        if child == 0:
            try:
                keeper.close()
                keeper.settle(1)
            except CheckpointError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.opened.set()


EXIT = """
import sys, torch
from functools import partial
from pathlib import Path
from paceline.checkpoint import Contents, CheckpointWriter
keeper = CheckpointWriter(Path(sys.argv[1]))
big = {"w": torch.ones(4_000_000)}
keeper.take(Contents(run="r", step=1, operation=1, epoch=0, position=0, model=big))
keeper.settle(1)
"""


def test_an_exit_without_close_finishes_what_is_settled(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT, str(tmp_path)], capture_output=True, timeout=60, check=False, env={**os.environ}
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert operations(tmp_path) == [1]
    assert partials(tmp_path) == []


# -- memory ----------------------------------------------------------------------------------------------------------


def test_snapshots_use_the_same_memory_again() -> None:
    buffers = SnapshotBuffers()
    first = buffers.copy(files.prepare(contents(1)))
    again = buffers.copy(files.prepare(contents(2)))
    for name, tensor in first.model_tensors.items():
        assert again.model_tensors[name].data_ptr() == tensor.data_ptr()
    used = sum(tensor.nbytes for tensor in [*again.model_tensors.values(), *again.state_tensors.values()])
    assert used <= buffers.num_bytes <= used + 64 * (len(again.model_tensors) + len(again.state_tensors))
    smaller = buffers.copy(files.prepare(contents(3, model={"w": torch.ones(2, 2)})))
    assert smaller.model_tensors["w"].equal(torch.ones(2, 2))


@given(st.lists(st.integers(0, 50), max_size=8), st.integers(1, 5))
def test_moves_are_divided_without_a_gap(sizes: list[int], num_parts: int) -> None:
    moves = [TensorCopy(1000 * index, 10_000 + 1000 * index, size) for index, size in enumerate(sizes)]
    parts = divide(moves, num_parts)
    assert 1 <= len(parts) <= num_parts
    wanted = [(move.to + k, move.source + k) for move in moves for k in range(move.num_bytes)]
    done = [(move.to + k, move.source + k) for part in parts for move in part for k in range(move.num_bytes)]
    assert done == wanted
    lengths = [sum(move.num_bytes for move in part) for part in parts]
    assert all(length == lengths[0] for length in lengths[:-1])


def test_a_large_state_is_copied_by_several_threads() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        model = {str(index): torch.randint(256, (5_000_000,), dtype=torch.uint8) for index in range(4)}
        model["turned"] = torch.rand(30, 20).t()
        found = SnapshotBuffers().copy(files.prepare(contents(1, model=model))).model_tensors
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())


def test_reserved_memory_is_what_a_snapshot_uses(make: Make) -> None:
    with make() as keeper:
        keeper.reserve(contents(1))
        reserved = keeper.buffer_bytes
        publish(keeper, 1)
        assert reserved == keeper.buffer_bytes > 0


def test_a_forked_child_does_not_share_the_memory() -> None:
    buffers = SnapshotBuffers()
    buffers.copy(files.prepare(contents(1)))
    assert buffers._memory.count_nonzero()
    child = os.fork()
    if child == 0:
        os._exit(3 if not buffers._memory.numpy().any() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert buffers._memory.count_nonzero()


def test_no_memory_for_a_snapshot_is_an_error_of_the_checkpoint_only(make: Make) -> None:
    endless = torch.zeros(1).expand(1 << 50)  # more than can be reserved
    with make() as keeper:
        assert keeper.take(dataclasses.replace(contents(1), model={"weight": endless})) is None
        assert [failure.operation for failure in keeper.errors()] == [1]
        publish(keeper, 1)
