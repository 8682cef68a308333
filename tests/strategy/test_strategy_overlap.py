"""Between hosts, where buckets are sent while backward goes on: the sums are right whatever order gradients come in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from paceline.collective import Group
from paceline.errors import GroupAborted
from paceline.strategy import Notice, Updater, buckets, overlap
from paceline.strategy.options import SessionOptions
from paceline.testing.crew import Crew, Raised
from tests.strategy import cases

SHARES = (7, 4, 1)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3, hosts="aab") as made:
        made.run(with_small_buckets)
        yield made


def with_small_buckets(group: Group) -> None:
    buckets.BUCKET_BYTES = 1000  # so that small models have several


def count_calls(method: str) -> list[str]:
    """Every later call of this method in this process, and whether buckets were under way before backward ended."""
    calls: list[str] = []
    original = getattr(overlap.Overlapped, method)

    def counted(self: overlap.Overlapped, *arguments: Any) -> Any:
        calls.append(method if not self._handles else f"{method} after an early start")
        return original(self, *arguments)

    setattr(overlap.Overlapped, method, counted)
    return calls


def train_and_count(group: Group, name: str, options: dict[str, Any]) -> Any:
    original = overlap.Overlapped.reduce
    calls = count_calls("reduce")
    found = cases.train(group, name, SHARES, 4, **options)
    overlap.Overlapped.reduce = original  # type: ignore[method-assign]
    return found | {"calls": calls}


@pytest.mark.parametrize("options", [{}, {"micro_batch": 3}, {"clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("name", ["mlp", "tied_and_frozen", "several_types", "weighted", "branches", "channels_last"])
def test_early_sums_are_those_of_one_process(crew: Crew, name: str, options: dict[str, Any]) -> None:
    found = crew.run(train_and_count, name, options)
    expected = cases.by_hand(name, 4, clip_norm=options.get("clip_norm"))
    assert len({each["digest"] for each in found}) == 1
    for key, value in found[0]["state"].items():
        numpy.testing.assert_allclose(value, expected["state"][key], rtol=2e-4, atol=2e-6, err_msg=key)
    if name == "mlp":
        assert [call for call in found[0]["calls"] if "early" in call], "no bucket was sent early"
        assert found[0]["calls"][0] == "reduce", "the first attempt only counts"


def late_gradients(group: Group) -> Any:
    """From the third step on, the model runs twice under re-entrant checkpointing on rank 0: hooks fire twice."""
    case = cases.build("mlp")
    number = 0
    originals = overlap.Overlapped.reduce_late
    calls = count_calls("reduce_late")

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        if number < 2 or group.rank != 0:
            return case.loss_fn(x, y)
        again: Any = checkpoint
        x = x.requires_grad_()
        losses = [cross_entropy(again(case.modules, x, use_reentrant=True), y) for _ in range(2)]
        return (losses[0] + losses[1]) / 2

    strategy = Updater(case.modules, case.optimizers, SessionOptions(clip_norm=0.1))
    strategy.bind(group, group.rank, group.size)
    for number in range(4):
        cases.one_step(strategy, case._replace(loss_fn=loss_fn), number, SHARES, group.rank)
    found = cases.state(case), strategy.gradients.state_digest(), len(calls)
    strategy.close()
    overlap.Overlapped.reduce_late = originals  # type: ignore[method-assign]
    return found


def test_a_gradient_that_comes_late_is_added(crew: Crew) -> None:
    found = crew.run(late_gradients)
    expected = cases.by_hand("mlp", 4, clip_norm=0.1)["state"]
    assert len({digest for _, digest, _ in found}) == 1
    assert [calls for _, _, calls in found] == [1, 1, 1], "once late, then counted anew"
    for key, value in found[0][0].items():
        numpy.testing.assert_allclose(value, expected[key], rtol=2e-4, atol=2e-6, err_msg=key)


def ends_in_the_middle(group: Group, reason: type[Exception]) -> None:
    with_small_buckets(group)
    case = cases.build("mlp")
    calls, limit = 0, 10**9

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > limit:
            raise reason("in the middle of backward")

    strategy = Updater(case.modules, case.optimizers, check=check)
    strategy.bind(group, group.rank, group.size)
    for number in range(2):
        cases.one_step(strategy, case, number, SHARES, group.rank)
    before = strategy.gradients.state_digest()
    if group.rank == 1:
        limit = calls + 5
    batch, samples = cases.share_of(2, SHARES, group.rank)
    try:
        strategy.exchange(strategy.compute(case.loss_fn, batch, samples=samples, total=12, step=2), Notice(2))
    finally:
        assert strategy.gradients.state_digest() == before
        assert (strategy.gradients.limit > 0) == (reason is MemoryError and group.rank == 1)
        strategy.close()


@pytest.mark.parametrize(("reason", "raised"), [(KeyError, KeyError), (MemoryError, GroupAborted)])
def test_an_attempt_that_ends_in_the_middle_ends_the_group(reason: type[Exception], raised: type[Exception]) -> None:
    """For want of memory too: the next attempt, in smaller pieces, is one in another group."""
    with Crew(3, hosts="aab") as crew:
        crew.start(ends_in_the_middle, reason)
        outcomes = crew.outcomes()
    assert all(isinstance(outcome, Raised) for outcome in outcomes)
    assert [type(outcome.error) for outcome in outcomes] == [GroupAborted, raised, GroupAborted]
    assert "a part of its gradients was sent" in str(outcomes[0].error)
