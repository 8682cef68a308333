"""A worker that runs out of memory computes its share in smaller pieces."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import OutOfSharedMemory
from paceline.strategy import Notice, Updater, memory
from paceline.strategy.loss_calls import piece_sizes
from paceline.strategy.options import SessionOptions


def cpu_error() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def python_error() -> None:
    raise MemoryError


def cuda_error() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


ERRORS = [cpu_error, python_error, cuda_error]


def make(model: nn.Module, **options: Any) -> Updater:
    return Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), SessionOptions(**options))


def counting(model: nn.Module, fits: int, fail: Callable[[], None]) -> tuple[Callable[..., torch.Tensor], list[int]]:
    calls: list[int] = []

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        loss: torch.Tensor = model(x).square().mean()
        if len(x) > fits:
            fail()
        return loss

    return loss_fn, calls


@pytest.mark.parametrize("fail", ERRORS)
def test_the_share_is_halved_until_it_fits_and_stays_so(fail: Callable[[], None]) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(12, 4)
    expected = torch.autograd.grad(model(x).square().mean(), model.weight)[0]
    strategy = make(model)
    loss_fn, calls = counting(model, 4, fail)
    found = strategy.compute(loss_fn, x, samples=12, total=12, step=1)
    assert calls == [12, 6, 3, 3, 3, 3]
    assert strategy.gradients.limit == 3
    agreement = strategy.exchange(found, Notice(1))
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, expected)
    assert agreement.rows[0].limit == 3
    strategy.apply(agreement)
    calls.clear()
    strategy.compute(loss_fn, x, samples=12, total=12, step=2)
    assert calls == [3, 3, 3, 3]
    strategy.close()


def test_a_single_sample_that_does_not_fit_is_an_error_that_says_so() -> None:
    model = nn.Linear(4, 2)
    strategy = make(model)
    loss_fn, calls = counting(model, 0, python_error)
    with pytest.raises(MemoryError) as caught:
        strategy.compute(loss_fn, torch.randn(4, 4), samples=4, total=4, step=1)
    assert calls == [4, 2, 1]
    assert caught.value.__notes__ == ["memory does not suffice for 1 of this worker's samples at a time"]
    strategy.close()


def test_a_model_with_batch_statistics_never_gets_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    strategy = make(model)
    loss_fn, calls = counting(model, 3, python_error)
    strategy.compute(loss_fn, torch.randn(9, 4), samples=9, total=9, step=1)
    assert calls == [9, 4, 2, 2, 2, 3]
    strategy.close()
    assert piece_sizes(9, 2, 2) == [2, 2, 2, 3]
    assert piece_sizes(9, 2, 1) == [2, 2, 2, 2, 1]
    assert piece_sizes(0, 2, 2) == []


def test_what_cannot_be_cut_says_that_memory_was_the_cause() -> None:
    model = nn.Linear(4, 2)
    strategy = make(model)

    def loss_fn(x: torch.Tensor, scale: object) -> torch.Tensor:
        raise MemoryError("too much")

    with pytest.raises(TypeError, match="cannot be cut") as caught:
        strategy.compute(loss_fn, (torch.randn(4, 4), object()), samples=4, total=4, step=1)
    assert "after the memory did not suffice (MemoryError: too much)" in caught.value.__notes__[0]
    strategy.close()


def test_the_limit_rises_again_and_later_each_time_that_it_was_too_much() -> None:
    limit, tries = memory.MemoryLimit(), []
    limit.lower(MemoryError(), 8, 1)
    for step in range(1000):
        if limit.limit != 4:
            tries.append(step)
            limit.lower(MemoryError(), 8, 1)
        limit.sufficed(8)
    assert limit.limit == 4
    assert tries == [100, 300, 700]
    for _ in range(2000):
        limit.sufficed(8)  # whoever had the memory has given it back
    assert limit.limit == 0


def test_pieces_that_were_asked_for_are_no_limit_of_the_share() -> None:
    model = nn.Linear(4, 2)
    strategy = make(model, micro_batch=4)
    loss_fn, _ = counting(model, 2, python_error)
    found = strategy.compute(loss_fn, torch.randn(12, 4), samples=12, total=12, step=1)
    assert strategy.gradients.limit == 2
    assert strategy.exchange(found, Notice(1)).rows[0].limit == 0
    strategy.close()


def test_other_errors_are_not_taken_for_it() -> None:
    assert not memory.is_exhausted(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not memory.is_exhausted(ValueError("out of memory"))
    assert not memory.is_exhausted(OutOfSharedMemory("the host has none left"))
    assert memory.is_exhausted(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))


def test_what_the_failed_attempt_held_is_free_before_the_next_one() -> None:
    model = nn.Linear(4, 2)
    strategy = make(model)
    held: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(x: torch.Tensor) -> torch.Tensor:
        if held:
            gc.collect()
            assert held[0]() is None, "the activations of the first attempt are still there"
        activation = model(x)
        if not held:
            held.append(weakref.ref(activation))
            raise MemoryError
        found: torch.Tensor = activation.square().mean()
        return found

    strategy.compute(loss_fn, torch.randn(4, 4), samples=4, total=4, step=1)
    assert strategy.gradients.limit == 2
    strategy.close()
