"""Batches: the same whoever collates them, from loader workers that stay, with clear errors and nothing left behind."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

from paceline.data.dataset import check_dataset
from paceline.data.loader import MAX_DEATHS, Loader, LoaderOptions
from paceline.data.window import BatchSpec
from paceline.errors import LoaderError
from paceline.testing.eventually import eventually
from tests.data.samples import Augmented, Gated, Troubled, after, batches_of, works

TWO = LoaderOptions(num_workers=2)


def fetch_all(loader: Loader, plan: list[BatchSpec]) -> list[Any]:
    return [loader.fetch(work, after(plan, position)) for position, work in enumerate(plan)]


def drawn_by_index(batches: list[Any]) -> dict[int, list[float]]:
    return {
        int(index): drawn.tolist()
        for batch in batches
        for index, drawn in zip(batch["index"], batch["drawn"], strict=True)
    }


def test_samples_do_not_depend_on_who_fetches_them() -> None:
    indices = np.random.default_rng(0).permutation(100).tolist()
    with Loader(Augmented(), seed=5, options=TWO) as two, Loader(Augmented(), seed=5) as none:
        in_tens = fetch_all(two, works(0, 0, batches_of(indices, 10)))
        in_sevens = fetch_all(none, works(0, 0, batches_of(indices[::-1], 7)))
        other_epoch = fetch_all(none, works(0, 0, batches_of(indices, 10), epoch=1))
    assert [batch["index"].tolist() for batch in in_tens] == batches_of(indices, 10)
    assert {int(pid) for batch in in_tens for pid in batch["pid"]}.isdisjoint({os.getpid()})
    drawn = drawn_by_index(in_tens)
    assert drawn == drawn_by_index(in_sevens)
    assert len(drawn) == 100
    # All drawn numbers differ: between samples, between generators and between epochs.
    numbers = [number for batches in (drawn, drawn_by_index(other_epoch)) for row in batches.values() for number in row]
    assert len(set(numbers)) == 600


def test_another_seed_gives_other_samples() -> None:
    one, other = (Loader(Augmented(), seed=seed).fetch(BatchSpec((0, 0), 0, (1,)), after([], 0)) for seed in (1, 2))
    assert not torch.equal(one["drawn"], other["drawn"])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_generators_of_the_trainer_are_left_alone(num_workers: int) -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    seed()
    expected = draw()
    seed()
    with Loader(Augmented(), seed=5, options=LoaderOptions(num_workers=num_workers)) as loader:
        fetch_all(loader, works(0, 0, [[1, 2], [3]]))
    assert draw() == expected


def test_loader_workers_stay_through_batches_plans_and_epochs() -> None:
    with Loader(Augmented(), seed=0, options=TWO) as loader:
        pids: set[int] = set()
        for generation in range(5):
            plan = works(generation, generation * 10, [[k, k + 1] for k in range(20)], epoch=generation)
            # The last ten that were prefetched are stale after each.
            for position, work in enumerate(plan[:10]):
                pids.update(loader.fetch(work, after(plan, position))["pid"].tolist())
        # To the end of an epoch, and into the next.
        for epoch in (5, 6):
            for batch in fetch_all(loader, works(5, 100 * epoch, [[1], [2], [3]], epoch)):
                pids.update(batch["pid"].tolist())
        pids.discard(os.getpid())  # after a change of plan a batch may be collated on the spot
        assert len(pids) == 2
        assert pids == {child.pid for child in multiprocessing.active_children()}


def open_when_stale(loader: Loader, gate: Path) -> None:
    eventually(lambda: int(loader._batches._horizon) > 0, "what was prefetched is given up")
    gate.touch()


def test_stale_batches_are_dropped_and_not_collated(tmp_path: Path) -> None:
    dataset = Gated(tmp_path)
    old = works(0, 0, [[0], [50, *range(51, 100)], *batches_of(list(range(100, 200)), 10)])
    new = works(1, 1, batches_of(list(range(500, 530)), 5))
    with Loader(dataset, seed=0, options=LoaderOptions(num_workers=1, prefetch_factor=4)) as loader:
        assert loader.fetch(old[0], after(old, 0)).tolist() == [0]
        # The loader worker is now inside of sample 50, of a batch that the next plan does not want.
        eventually(lambda: 50 in dataset.fetched(), "sample 50 is asked for")
        opener = threading.Thread(target=open_when_stale, args=(loader, dataset.gate))
        opener.start()
        assert loader.fetch(new[0], after(new, 0)).tolist() == list(range(500, 505))
        assert loader.fetch(new[1], after(new, 1)).tolist() == list(range(505, 510))
        opener.join()
    assert [index for index in dataset.fetched() if index < 500] == [0, 50]


def test_a_plan_may_change_at_every_step() -> None:
    with Loader(Augmented(), seed=0, options=TWO) as loader:
        for step in range(30):
            plan = works(step, step, [[step, k] for k in range(5)])
            assert loader.fetch(plan[0], after(plan, 0))["index"].tolist() == [step, 0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_same_work_can_be_fetched_again(num_workers: int) -> None:
    plan = works(0, 0, [[1], [2], [3]])
    with Loader(Augmented(), seed=0, options=LoaderOptions(num_workers=num_workers)) as loader:
        first, again = (loader.fetch(plan[0], after(plan, 0)) for _ in range(2))
        assert torch.equal(first["drawn"], again["drawn"])
        assert loader.fetch(plan[1], after(plan, 1))["index"].tolist() == [2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_works_without_samples(num_workers: int) -> None:
    plan = works(0, 0, [[], [1], [], [], [2, 3], []])
    with Loader(Augmented(), seed=0, options=LoaderOptions(num_workers=num_workers)) as loader:
        found = [batch and batch["index"].tolist() for batch in fetch_all(loader, plan)]
    assert found == [None, [1], None, None, [2, 3], None]


def test_an_empty_work_touches_nothing() -> None:
    loader = Loader(Troubled(), seed=0, options=TWO)
    assert loader.fetch(BatchSpec((0, 0), 0, ()), after([], 0)) is None
    assert multiprocessing.active_children() == []


def test_indices_as_an_array_and_a_collate_function() -> None:
    with Loader([10, 11, 12], seed=0, options=LoaderOptions(collate_fn=tuple)) as loader:
        assert loader.fetch(BatchSpec((0, 0), 0, np.array([2, 0])), after([], 0)) == (12, 10)


@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_a_tensor_dataset_is_collated_at_once_with_the_same_result(layout: str) -> None:
    images = torch.rand(20, 3, 4, 5).to(memory_format=torch.channels_last if layout == "transposed" else None)
    dataset = TensorDataset(images, torch.arange(20), torch.rand(20).to(torch.bfloat16))
    indices = [7, 3, 3, 19]
    found = Loader(dataset, seed=0).fetch(BatchSpec((0, 0), 0, tuple(indices)), after([], 0))
    expected = default_collate([dataset[k] for k in indices])
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
        assert (one.dtype, one.stride()) == (other.dtype, other.stride())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_dataset_reaches_the_caller_and_the_loader_goes_on(num_workers: int) -> None:
    plan = works(0, 0, [[1], [12, 13], [2]])
    with Loader(Troubled(), seed=0, options=LoaderOptions(num_workers=num_workers)) as loader:
        assert loader.fetch(plan[0], after(plan, 0)).tolist() == [1]
        for _ in range(2):
            with pytest.raises(ValueError, match="thirteen") as caught:
                loader.fetch(plan[1], after(plan, 1))
            told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
            assert "sample 13 in epoch 0" in told
            if num_workers:
                assert "samples.py" in told
                assert "__getitem__" in told
        assert loader.fetch(plan[2], after(plan, 2)).tolist() == [2]


def test_an_error_that_cannot_travel_is_told() -> None:
    with (
        Loader(Troubled(), seed=0, options=LoaderOptions(num_workers=1)) as loader,
        pytest.raises(RuntimeError, match="fourteen"),
    ):
        loader.fetch(BatchSpec((0, 0), 0, (14,)), after([], 0))


def test_an_error_in_a_stale_batch_troubles_nobody() -> None:
    old, new = works(0, 0, [[1], [13]]), works(1, 1, [[2]])
    with Loader(Troubled(), seed=0, options=LoaderOptions(num_workers=1)) as loader:
        loader.fetch(old[0], after(old, 0))
        assert loader.fetch(new[0], after(new, 0)).tolist() == [2]


def test_an_error_of_collate_and_of_following_reaches_the_caller() -> None:
    def cannot(samples: list[Any]) -> Any:
        raise KeyError("cannot collate")

    def lost(k: int) -> BatchSpec:
        raise LookupError("no plan")

    with Loader(Troubled(), seed=0, options=LoaderOptions(num_workers=1, collate_fn=cannot)) as loader:
        with pytest.raises(LookupError, match="no plan"):
            loader.fetch(BatchSpec((0, 0), 0, (1,)), lost)
        with pytest.raises(KeyError, match="cannot collate"):
            loader.fetch(BatchSpec((0, 0), 0, (1,)), after([], 0))


@pytest.fixture
def torch_sets_its_handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has not set its handler of SIGCHLD yet, whatever ran before in this process."""
    handler = signal.getsignal(signal.SIGCHLD)
    monkeypatch.setattr("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False)
    yield
    signal.signal(signal.SIGCHLD, handler)


@pytest.mark.usefixtures("torch_sets_its_handler")
def test_a_sample_that_kills_every_loader_worker_is_a_clear_error_and_nothing_is_left() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    told: list[str] = []
    loader = Loader(Troubled(), seed=0, options=TWO, on_death=told.append)
    # The deadly batch is not prefetched, or its death might be noticed earlier.
    plan = works(3, 7, [[1], [15], [2]])
    loader.fetch(plan[0], after([], 0))
    # torch's handler, which would raise in the main thread at any time, is not there.
    assert signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(
        LoaderError, match=r"step 8 .generation 3.*5 times in a row.*SIGKILL at sample 15 of epoch 0.*lack of memory"
    ):
        loader.fetch(plan[1], after(plan, 1))
    assert (len(told), loader.num_deaths) == (MAX_DEATHS, MAX_DEATHS)
    assert multiprocessing.active_children() == []
    with pytest.raises(LoaderError, match="closed"):
        loader.fetch(plan[2], after(plan, 2))
    loader.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader worker has little time to end by itself."""
    monkeypatch.setattr("paceline.data.pool.ASKED_S", 0.2)


@pytest.mark.usefixtures("impatient")
def test_a_batch_that_takes_too_long_is_a_clear_error(tmp_path: Path) -> None:
    loader = Loader(Gated(tmp_path), seed=0, options=LoaderOptions(num_workers=1, timeout=0.5))
    with pytest.raises(LoaderError, match=r"step 4.*timed out.*raise timeout"):
        loader.fetch(BatchSpec((0, 4), 0, (50,)), after([], 0))
    assert multiprocessing.active_children() == []


@pytest.mark.usefixtures("torch_sets_its_handler")
def test_the_death_of_other_children_is_no_error_of_the_loader() -> None:
    plan = works(0, 0, [[k] for k in range(20)])
    handler = signal.getsignal(signal.SIGCHLD)
    # A user's own DataLoader in the main thread installs torch's handler.
    users = iter(DataLoader([1, 2, 3], num_workers=1))  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGCHLD) is not handler
    with Loader(Augmented(), seed=0, options=TWO) as loader:
        for position, work in enumerate(plan):
            if position % 5 == 0:
                other = subprocess.Popen(["sleep", "60"])
                other.kill()
                assert other.wait(timeout=60) == -signal.SIGKILL
            assert loader.fetch(work, after(plan, position))["index"].tolist() == [position]
    assert [int(batch) for batch in users] == [1, 2, 3]
    del users


@pytest.mark.usefixtures("impatient")
def test_close_ends_a_loader_worker_that_is_stopped() -> None:
    loader = Loader(Augmented(), seed=0, options=LoaderOptions(num_workers=1))
    plan = works(0, 0, [[1], [2]])
    loader.fetch(plan[0], after(plan, 0))
    (child,) = multiprocessing.active_children()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGSTOP)
    loader.close()
    loader.close()
    assert multiprocessing.active_children() == []


def test_a_forgotten_loader_ends_its_workers() -> None:
    loader = Loader(Augmented(), seed=0, options=TWO)
    plan = works(0, 0, [[1], [2]])
    loader.fetch(plan[0], after(plan, 0))
    del loader
    gc.collect()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("ending", ["pass", "raise SystemExit(0)"])
def test_an_interpreter_that_exits_without_close_does_not_hang(ending: str) -> None:
    script = f"""
        import multiprocessing
        from tests.data.samples import Augmented, after, works
        from paceline.data.loader import Loader, LoaderOptions
        loader = Loader(Augmented(), seed=0, options=LoaderOptions(num_workers=2))
        plan = works(0, 0, [[1], [2], [3]])
        loader.fetch(plan[0], after(plan, 0))
        print(*[child.pid for child in multiprocessing.active_children()])
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    pids = done.stdout.split()
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_loader_workers_that_are_spawned() -> None:
    plan = works(0, 0, [[1], [2]])
    options = LoaderOptions(num_workers=1, multiprocessing_context="spawn")
    with Loader(Augmented(), seed=5, options=options) as spawned, Loader(Augmented(), seed=5) as none:
        for one, other in zip(fetch_all(spawned, plan), fetch_all(none, plan), strict=True):
            assert torch.equal(one["drawn"], other["drawn"])


class Endless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "error", "says"),
    [
        (Endless(), TypeError, "iterable datasets are not supported yet"),
        (iter([1]), TypeError, "has no __len__"),
        ({1}, TypeError, "has no __getitem__"),
        ([], ValueError, "is empty"),
    ],
)
def test_what_is_no_dataset_is_refused(dataset: Any, error: type[Exception], says: str) -> None:
    for use in (check_dataset, lambda given: Loader(given, seed=0)):
        with pytest.raises(error, match=says):
            use(dataset)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_workers": -1}, "num_workers=-1"),
        ({"timeout": -1, "num_workers": 1}, "timeout=-1"),
        ({"prefetch_factor": 0, "num_workers": 1}, "prefetch_factor=0"),
        ({"prefetch_factor": 2}, "prefetch_factor=2 has no effect"),
        ({"timeout": 3}, "timeout=3 has no effect"),
    ],
)
def test_wrong_options_are_refused_when_built(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LoaderOptions(**options)


def test_after_a_change_of_plan_a_quick_batch_is_collated_on_the_spot_and_prefetching_goes_on() -> None:
    with Loader(Augmented(), seed=0, options=TWO) as loader:
        first, second = works(0, 0, [[k] for k in range(20)]), works(1, 5, [[k, k + 1] for k in range(20)])
        fetched = [loader.fetch(work, after(first, position)) for position, work in enumerate(first[:5])]
        fetched += [loader.fetch(work, after(second, position)) for position, work in enumerate(second[:6])]
    assert [batch["index"].tolist() for batch in fetched[5:]] == [[k, k + 1] for k in range(6)]
    here = [os.getpid() in batch["pid"].tolist() for batch in fetched]
    assert here == [False] * 5 + [True] + [False] * 5
    with Loader(Augmented(), seed=0, options=LoaderOptions()) as loader:
        again = [loader.fetch(work, after(second, position)) for position, work in enumerate(second[:6])]
    assert [batch["drawn"].tolist() for batch in again] == [batch["drawn"].tolist() for batch in fetched[5:]]


def test_without_loader_workers_there_is_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives it a name for a moment, and a process that is killed then leaves that behind."""
    monkeypatch.setattr(torch.Tensor, "share_memory_", lambda self: pytest.fail("memory was shared with nobody"))
    with Loader(list(range(10)), seed=0) as loader:
        assert loader.fetch(BatchSpec((1, 0), 0, (3, 4)), lambda _: None).tolist() == [3, 4]
