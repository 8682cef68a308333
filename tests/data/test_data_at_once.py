"""A batch that is read at once is the batch of its samples, fetched one by one: values, types, shapes and strides."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from paceline.data.at_once import read_rows, reads_rows
from paceline.data.collating import BatchMaker
from paceline.data.loader import Loader, LoaderOptions
from paceline.data.window import BatchSpec
from tests.data.samples import after

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
NUM = 7


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any type, shape and order of dimensions in memory, whole or a part of a larger one."""
    shape = (NUM, *draw(st.lists(st.integers(1, 3), max_size=4)))
    order = draw(st.permutations(range(len(shape))))
    step = draw(st.integers(1, 2))
    whole = torch.randint(0, 100, [shape[k] * step for k in order]).to(draw(st.sampled_from(DTYPES)))
    parts: torch.Tensor = whole[tuple(slice(None, None, step) for _ in shape)]
    found = parts.permute([order.index(k) for k in range(len(shape))])
    assert found.shape == shape
    return found


def alike(found: Any, expected: Any) -> bool:
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert found.stride() == expected.stride()
        return torch.equal(found, expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        return all(alike(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return all(itertools.starmap(alike, zip(found, expected, strict=True)))
    return bool(found == expected)


def is_unusual(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 5 and tensor.stride() != tensor.new_empty(tensor.shape).stride()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.data())
def test_rows_are_what_the_samples_collate_to(data: st.DataObject) -> None:
    columns = data.draw(st.lists(tensors(), min_size=1, max_size=3))
    base: Any = data.draw(st.sampled_from([TensorDataset(*columns), columns[0]]))
    chosen = data.draw(st.none() | st.lists(st.integers(-NUM, NUM - 1), min_size=1, max_size=9))
    dataset = base if chosen is None else Subset(base, chosen)
    indices = data.draw(st.lists(st.integers(0, len(dataset) - 1), min_size=1, max_size=9))
    expected = default_collate([dataset[index] for index in indices])
    assert reads_rows(dataset)
    assert alike(BatchMaker(dataset, 0, None, num_workers=0).collate(BatchSpec((0, 0), 0, tuple(indices))), expected)
    found = read_rows(dataset, np.array(indices))
    if found is None:  # one by one, where that may give something else
        assert min(chosen or [0]) < 0 or any(is_unusual(one) for one in columns)
    else:
        assert alike(found, expected)


class Doubled(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * value for value in super().__getitem__(index))  # type: ignore[no-untyped-call]


class Named(torch.Tensor):
    """A subclass of torch.Tensor, which may index in its own way."""


def test_a_subclass_does_not_take_the_short_way() -> None:
    doubled = Doubled(torch.arange(10))
    assert not reads_rows(doubled)
    assert not reads_rows(Subset(doubled, [1, 2]))
    for dataset, expected in ((doubled, [6, 4]), (Subset(doubled, [5, 4, 1, 2]), [4, 2])):
        (found,) = Loader(dataset, seed=0).fetch(BatchSpec((0, 0), 0, (3, 2)), after([], 0))
        assert found.tolist() == expected
    assert read_rows(TensorDataset(torch.arange(3).as_subclass(Named)), [1]) is None


def test_what_may_collate_otherwise_is_fetched_one_by_one() -> None:
    complex_ones = torch.tensor([1 + 2j, 3 + 4j, 5 + 6j])
    for tensor in (
        torch.rand(3, 2).requires_grad_(),
        complex_ones.conj(),
        complex_ones.conj().imag,  # negated when it is read
        torch.eye(3).to_sparse(),
    ):
        assert read_rows(TensorDataset(tensor), [0]) is None
    assert read_rows(TensorDataset(complex_ones), [2])[0].tolist() == [5 + 6j]


def test_a_collate_function_gets_samples() -> None:
    options = LoaderOptions(collate_fn=lambda samples: [type(sample) for sample in samples])
    loader = Loader(TensorDataset(torch.arange(4)), seed=0, options=options)
    assert loader.fetch(BatchSpec((0, 0), 0, (1, 2)), after([], 0)) == [tuple, tuple]


# -- datasets with __getitems__ ----------------------------------------------------------------------------------------


class Batched(Dataset[Any]):
    """Like a data set of Hugging Face: columns by name, single samples and lists of them. Counts what it is asked."""

    def __init__(self, drawn: Callable[[], float] = lambda: 0.0) -> None:
        self.asked: collections.Counter[str] = collections.Counter()
        self._drawn = drawn

    def __len__(self) -> int:
        return 50

    def sample(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((2,), float(index)), "y": index, "name": f"n{index}", "drawn": self._drawn()}

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.asked["one"] += 1
        return self.sample(index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        assert all(type(index) is int for index in indices)
        self.asked["many"] += 1
        return [self.sample(index) for index in indices]


def batches(dataset: Any, *, num_epochs: int = 2, num_workers: int = 0) -> list[Any]:
    works = [
        BatchSpec((0, epoch * 10 + start), epoch, np.arange(start, start + 5))
        for epoch in range(num_epochs)
        for start in range(0, 50, 5)
    ]
    with Loader(dataset, seed=3, options=LoaderOptions(num_workers=num_workers)) as loader:
        return [loader.fetch(work, after(works, position)) for position, work in enumerate(works)]


class OneByOne(Dataset[Any]):
    """The samples of another, without its `__getitems__`."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def test_items_are_asked_for_together_and_compared_once_an_epoch() -> None:
    dataset = Batched()
    found = batches(dataset)
    assert dataset.asked == {"one": 2 * 5, "many": 2 * 10}  # the first batch of each epoch both ways
    assert alike(found, batches(OneByOne(dataset)))


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "draw",
    [random.random, lambda: float(np.random.rand()), lambda: torch.rand(()).item()],
    ids=["random", "numpy", "torch"],
)
def test_samples_that_draw_are_fetched_one_by_one(draw: Callable[[], float], num_workers: int) -> None:
    dataset = Batched(draw)
    found = batches(dataset, num_workers=num_workers)
    assert alike(found, batches(OneByOne(dataset)))
    assert len({value for batch in found for value in batch["drawn"].tolist()}) == 100
    if not num_workers:
        assert dataset.asked["many"] == 1


def test_what_draws_and_hides_it_is_found_by_comparing() -> None:
    def draw() -> float:
        with torch.random.fork_rng(devices=[]):
            return torch.rand(()).item()

    dataset = Batched(draw)
    assert alike(batches(dataset), batches(OneByOne(Batched(draw))))
    assert dataset.asked["many"] == 1


def test_a_dataset_that_begins_to_draw_later_is_noticed_at_once() -> None:
    class Later(Batched):
        def sample(self, index: int) -> dict[str, Any]:
            return super().sample(index) | {"drawn": random.random() if index >= 30 else 0.0}

    dataset = Later()
    found = batches(dataset, num_epochs=1)
    assert alike(found, batches(OneByOne(dataset), num_epochs=1))
    assert dataset.asked["many"] == 7


@pytest.mark.parametrize("fault", ["other", "fewer", "raises"])
def test_items_that_are_not_the_samples_are_not_used(fault: str) -> None:
    class Wrong(Batched):
        def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
            items = super().__getitems__(indices)
            if fault == "raises":
                raise RuntimeError("not today")
            return items[1:] if fault == "fewer" else [item | {"y": item["y"] * 1.0} for item in items]

    dataset = Wrong()
    assert alike(batches(dataset), batches(OneByOne(dataset)))
    assert dataset.asked["many"] == 1


def test_the_sample_that_raises_is_named() -> None:
    class Troubled(Batched):
        def sample(self, index: int) -> dict[str, Any]:
            if index == 13:
                raise ValueError("thirteen")
            return super().sample(index)

    loader = Loader(Troubled(), seed=0)
    loader.fetch(BatchSpec((0, 0), 0, (1, 2)), after([], 0))
    with pytest.raises(ValueError, match="thirteen") as caught:
        loader.fetch(BatchSpec((0, 1), 0, (12, 13)), after([], 0))
    assert "sample 13 in epoch 0" in caught.value.__notes__[0]
