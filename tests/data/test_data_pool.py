"""Loader workers that are killed cost nothing but time; those that are only asked to end go on; none outlives its
trainer."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data.loader import MAX_DEATHS, Loader, LoaderOptions
from paceline.testing.eventually import eventually
from tests.data.samples import Augmented, Gated, after, batches_of, works

TWO = LoaderOptions(num_workers=2)


@pytest.fixture(autouse=True)
def torch_does_not_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own look at its loader workers, every five seconds, comes too late for these tests."""
    monkeypatch.setattr(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data.__defaults__", (600.0,)
    )


def children() -> list[int]:
    return [child.pid for child in multiprocessing.active_children() if child.pid is not None]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def num_unread(loader: Loader) -> int:
    """Bytes of answers that nobody has read."""
    assert loader._pool is not None
    reader = loader._pool._answers._worker_result_queue._reader
    return int.from_bytes(fcntl.ioctl(reader.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)


def as_bytes(samples: list[Any]) -> list[bytes]:
    """More than a pipe holds: the loader worker stands in the middle of writing its answer until somebody reads."""
    return [bytes([sample["index"]]) * (1 << 20) for sample in samples]


@pytest.mark.parametrize("killed", ["one", "all"])
def test_batches_are_the_same_through_kills(killed: str) -> None:
    plan = works(0, 0, batches_of(list(range(100)), 4))
    chance = random.Random(killed)
    found, told = [], list[str]()
    with Loader(Augmented(), seed=3, options=TWO, on_death=told.append) as loader:
        for position, work in enumerate(plan):
            found.append(loader.fetch(work, after(plan, position)))
            if position % 3 == 0:
                for pid in children()[: 1 if killed == "one" else 2]:
                    time.sleep(chance.random() / 200)  # wherever it is just then
                    with contextlib.suppress(ProcessLookupError):  # it may have gone with another
                        os.kill(pid, signal.SIGKILL)
        assert 4 <= loader.num_deaths == len(told)
    assert "was killed by SIGKILL" in told[0]
    with Loader(Augmented(), seed=3) as none:
        for one, position in zip(found, range(len(plan)), strict=True):
            other = none.fetch(plan[position], after(plan, position))
            assert torch.equal(one["index"], other["index"])
            assert torch.equal(one["drawn"], other["drawn"])


@pytest.mark.parametrize("is_asked", [True, False])
def test_nothing_of_loader_workers_is_left(is_asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of shared memory, as it is left by one that is killed between making it and taking the name away; and
    folders of multiprocessing."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # that of the machine is others' too
    plan = works(0, 0, batches_of(list(range(8)), 4))
    with Loader(Augmented(), seed=3, options=TWO) as loader:
        loader.fetch(plan[0], after(plan, 0))
        names = [Path(f"/dev/shm/torch_{pid}_123_4") for pid in children()]
        assert len(names) == 2
        for name in names:
            name.touch()
        if not is_asked:
            os.kill(children()[0], signal.SIGKILL)
        loader.fetch(plan[1], after(plan, 1))
    assert [name for name in names if name.exists()] == []
    assert set(tmp_path.glob("pymp-*")) <= {Path(get_temp_dir())}


@pytest.mark.parametrize("others", [0, 1])
def test_half_an_answer_holds_up_nobody(others: int) -> None:
    """Also where loader workers of other data, started later, have inherited the pipe."""
    plan = works(0, 0, [[k] for k in range(12)])
    options = LoaderOptions(num_workers=1, collate_fn=as_bytes)
    with Loader(Augmented(), seed=0, options=options) as loader, Loader(Augmented(), seed=0, options=TWO) as other:
        for position, work in enumerate(plan):
            (found,) = loader.fetch(work, after(plan, position))
            assert found == bytes([position]) * (1 << 20)
            if position == 0:
                mine = children()
                if others:
                    other.fetch(works(0, 0, [[1]])[0], after([], 0))
            elif position == 5:
                eventually(lambda: num_unread(loader) >= 1 << 12, "a part of an answer lies in the pipe")
                os.kill(mine[0], signal.SIGKILL)
        assert loader.num_deaths == 1
        assert other.num_deaths == 0


def test_an_end_that_was_asked_for_is_no_death(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(5):
        with Loader(Augmented(), seed=0, options=TWO) as loader:
            loader.fetch(works(0, 0, [[1]])[0], after([], 0))
    assert not caplog.records


def test_deaths_are_counted_in_a_row_only() -> None:
    plan = works(0, 0, [[k] for k in range(4 * MAX_DEATHS)])
    with Loader(Augmented(), seed=0, options=LoaderOptions(num_workers=1)) as loader:
        for position, work in enumerate(plan):
            loader.fetch(work, after([], 0))
            if position % 2:
                os.kill(children()[0], signal.SIGKILL)
        loader.fetch(plan[0], after([], 0))
        assert loader.num_deaths == 2 * MAX_DEATHS


def test_a_death_while_somebody_waits_is_noticed(tmp_path: Path) -> None:
    dataset = Gated(tmp_path)
    plan = works(0, 0, [[1], [50]])
    with Loader(dataset, seed=0, options=LoaderOptions(num_workers=1)) as loader:
        loader.fetch(plan[0], after([], 0))
        (pid,) = children()
        # The first is killed while it waits for the gate, which is open for the next.
        script = f"""
            import os, pathlib, signal, time
            ends_at = time.monotonic() + 60
            while "50" not in pathlib.Path({str(dataset.log)!r}).read_text().split() and time.monotonic() < ends_at:
                time.sleep(0.005)
            os.kill({pid}, signal.SIGKILL)
            pathlib.Path({str(dataset.gate)!r}).touch()
        """
        killer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)])
        assert loader.fetch(plan[1], after(plan, 1)).tolist() == [50]
        assert killer.wait(60) == 0
        assert loader.num_deaths == 1


_newborn: list[int] = []
os.register_at_fork(after_in_child=lambda: signal_myself())


def signal_myself() -> None:
    for number in _newborn:
        os.kill(os.getpid(), number)


@pytest.fixture
def newborn() -> Iterator[list[int]]:
    """Signals that a forked child gets before it does anything."""
    yield _newborn
    _newborn.clear()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["at work", "just started"])
def test_loader_workers_do_not_mind_signals(number: signal.Signals, moment: str, newborn: list[int]) -> None:
    if moment == "just started":
        newborn.append(number)
    plan = works(0, 0, [[k] for k in range(20)])
    with Loader(Augmented(), seed=0, options=TWO) as loader:
        for position, work in enumerate(plan):
            for pid in children():
                os.kill(pid, number)
            loader.fetch(work, after(plan, position))
        assert loader.num_deaths == 0


def test_what_a_loader_worker_starts_minds_signals() -> None:
    with Loader(Starting(), seed=0, options=LoaderOptions(num_workers=1)) as loader:
        assert loader.fetch(works(0, 0, [[0]])[0], after([], 0)).tolist() == [-signal.SIGTERM]


class Starting:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        child = subprocess.Popen(["sleep", "600"])
        child.terminate()
        return child.wait(60)


@pytest.mark.parametrize("context", ["fork", "spawn", "forkserver"])
def test_loader_workers_end_with_a_trainer_that_is_killed(context: str) -> None:
    script = f"""
        import multiprocessing, time
        from tests.data.samples import Augmented, after, works
        from paceline.data.loader import Loader, LoaderOptions
        if __name__ == "__main__":
            loader = Loader(
                Augmented(), seed=0, options=LoaderOptions(num_workers=2, multiprocessing_context={context!r})
            )
            loader.fetch(works(0, 0, [[1]])[0], after([], 0))
            print(*[child.pid for child in multiprocessing.active_children()], flush=True)
            time.sleep(600)
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with trainer:
        try:
            assert trainer.stdout is not None
            pids = [int(word) for word in trainer.stdout.readline().split()]
            assert len(pids) == 2
        finally:
            trainer.kill()
    eventually(lambda: not any(map(is_alive, pids)), "the loader workers end")
