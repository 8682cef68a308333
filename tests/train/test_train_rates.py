"""Learning rates: scaling by the global batch, warm-up, courses, and a state that can travel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from paceline.checkpoint import tree
from paceline.train.rates import Rates, RateSchedule, WarmUp


def make_optimizer(rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)


def rates_of(schedule: RateSchedule, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(schedule.optimizer.param_groups[0]["lr"])
        schedule.optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(("scale", "expected"), [("linear", 0.4), ("sqrt", 0.2)])
def test_rates_scale_with_the_global_batch(scale: Any, expected: float) -> None:
    schedule = Rates(base_batch=256, scale=scale).build(make_optimizer(), global_batch=1024, num_steps=10)
    assert rates_of(schedule, 3) == pytest.approx([expected] * 3)


def test_without_scaling_the_rate_stays_as_it_is() -> None:
    assert rates_of(Rates().build(make_optimizer(), global_batch=1024, num_steps=10), 2) == [0.1, 0.1]


def test_a_warm_up_rises_in_equal_parts_to_the_full_rate() -> None:
    schedule = Rates(warm_up=WarmUp(steps=4)).build(make_optimizer(1.0), global_batch=8, num_steps=10)
    assert rates_of(schedule, 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_a_warm_up_may_start_above_zero() -> None:
    rates = Rates(base_batch=4, scale="linear", warm_up=WarmUp(steps=2, start=0.5))
    assert rates_of(rates.build(make_optimizer(1.0), global_batch=8, num_steps=9), 3) == pytest.approx([1.5, 2.0, 2.0])


def test_the_cosine_begins_after_the_warm_up_and_ends_with_the_training() -> None:
    rates = Rates(warm_up=WarmUp(steps=2), schedule="cosine", final=0.1)
    found = rates_of(rates.build(make_optimizer(1.0), global_batch=8, num_steps=12), 14)
    assert found[2] == pytest.approx(1.0)
    assert found[7] == pytest.approx(0.1 + 0.9 * 0.5)
    assert found[11] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(0.9 * math.pi)))
    assert found[12] == found[13] == pytest.approx(0.1)


def test_a_course_of_ones_own() -> None:
    rates = Rates(schedule=lambda progress: 1.0 if progress < 0.5 else 0.1)
    assert rates_of(rates.build(make_optimizer(1.0), global_batch=8, num_steps=4), 4) == [1.0, 1.0, 0.1, 0.1]


def test_the_state_travels_and_the_rest_is_the_same() -> None:
    rates = Rates(warm_up=WarmUp(steps=3), schedule=lambda progress: 1.0 - progress)
    first = rates.build(make_optimizer(), global_batch=8, num_steps=20)
    rates_of(first, 7)
    document, tensors = tree.flatten(first.state_dict())
    second = rates.build(make_optimizer(), global_batch=8, num_steps=20)
    second.load_state_dict(tree.unflatten(document, tensors))
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    assert rates_of(second, 5) == rates_of(first, 5)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: WarmUp(steps=0), "steps=0"),
        (lambda: WarmUp(steps=5, start=2.0), "start=2.0"),
        (lambda: Rates(scale="cubic", base_batch=3), "scale='cubic'"),  # type: ignore[arg-type]
        (lambda: Rates(scale="linear"), "base_batch=None"),
        (lambda: Rates(base_batch=256), "scale=None"),
        (lambda: Rates(base_batch=0, scale="sqrt"), "base_batch=0"),
        (lambda: Rates(schedule="steps"), "schedule='steps'"),  # type: ignore[arg-type]
        (lambda: Rates(final=1.5), "final=1.5"),
        (
            lambda: Rates(warm_up=WarmUp(steps=10)).build(make_optimizer(), global_batch=8, num_steps=10),
            r"WarmUp\(steps=10\) is not shorter than the training, which has 10 steps",
        ),
    ],
)
def test_bad_settings_are_named(build: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        build()
