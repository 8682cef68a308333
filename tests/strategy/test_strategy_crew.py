"""Three workers with unequal shares hold the same bits, and what one process computes on the global batch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from paceline.collective import Group
from paceline.errors import Disagreement, Diverged, GroupError, PeerLost
from paceline.strategy import Flag, Notice, Updater
from paceline.strategy.header import Row, exchange, exchange_text
from paceline.strategy.options import SessionOptions
from paceline.testing.crew import Crew, say
from tests.strategy import cases

NUM_STEPS = 3


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3) as made:
        yield made


def assert_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        numpy.testing.assert_allclose(value, expected[name], rtol=2e-4, atol=2e-6, err_msg=name)


# -- equal on all, equal to one process --------------------------------------------------------------------------------


@pytest.mark.parametrize("shares", [(7, 4, 1), (8, 4, 0), (0, 0, 12)])
@pytest.mark.parametrize("name", ["mlp", "tied_and_frozen", "several_types", "weighted", "branches", "channels_last"])
def test_unequal_shares_are_one_process(crew: Crew, name: str, shares: tuple[int, ...]) -> None:
    found = crew.run(cases.train_with, name, shares, NUM_STEPS, {})
    expected = cases.by_hand(name, NUM_STEPS)
    assert len({each["digest"] for each in found}) == 1
    for each in found:
        assert_close(each["state"], expected["state"])
        assert each["losses"] == found[0]["losses"]
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-4)


@pytest.mark.parametrize("shares", [(7, 4, 1), (8, 4, 0)])
def test_unused_everywhere_is_none_and_unused_somewhere_is_zero(crew: Crew, shares: tuple[int, ...]) -> None:
    found = crew.run(cases.train_with, "branches", shares, 1, {})
    for each in found:
        assert each["without"] == ["never.weight", "never.bias"]
    before = cases.state(cases.build("branches"))
    for key in (".never.weight", ".never.bias"):
        assert (found[0]["state"][key] == before[key]).all(), "AdamW must not decay what nobody used"
    assert (found[0]["state"][".sometimes.weight"] != before[".sometimes.weight"]).any()


@pytest.mark.parametrize("name", ["mlp", "several_types", "weighted"])
def test_clipping_is_that_of_one_process(crew: Crew, name: str) -> None:
    found = crew.run(cases.train_with, name, (7, 4, 1), NUM_STEPS, {"clip_norm": 0.1})
    expected = cases.by_hand(name, NUM_STEPS, clip_norm=0.1)
    assert len({each["digest"] for each in found}) == 1
    assert all(norm is not None and norm > 0.1 for norm in found[0]["norms"])
    assert [each["norms"] for each in found] == [found[0]["norms"]] * 3
    assert_close(found[0]["state"], expected["state"])


def test_micro_batches_are_the_whole(crew: Crew) -> None:
    whole = crew.run(cases.train_with, "mlp", (7, 4, 1), NUM_STEPS, {})
    cut = crew.run(cases.train_with, "mlp", (7, 4, 1), NUM_STEPS, {"micro_batch": 3})
    assert len({each["digest"] for each in cut}) == 1
    assert_close(cut[0]["state"], whole[0]["state"])


def test_batch_statistics_are_averaged_and_counted_alike(crew: Crew) -> None:
    shares = (6, 4, 2)
    found = crew.run(cases.train_with, "normalised", shares, 1, {})
    assert len({each["digest"] for each in found}) == 1
    means = []
    for rank in range(3):
        case = cases.build("normalised")
        batch, _ = cases.share_of(0, shares, rank)
        case.loss_fn(*batch)
        means.append(cases.state(case)[".1.running_mean"])
    expected = sum(share / cases.TOTAL * mean for share, mean in zip(shares, means, strict=True))
    numpy.testing.assert_allclose(found[0]["state"][".1.running_mean"], expected, rtol=1e-5, atol=1e-7)
    before = cases.state(cases.build("normalised"))
    assert (found[0]["state"][".constant"] == before[".constant"]).all()


def test_a_rank_without_samples_has_the_same_buffers(crew: Crew) -> None:
    found = crew.run(cases.train_with, "normalised", (8, 4, 0), NUM_STEPS, {"micro_batch": 5})
    assert len({each["digest"] for each in found}) == 1
    assert found[2]["state"][".1.num_batches_tracked"] == 2 * NUM_STEPS, "the most micro-batches of any rank"


def changes_a_buffer_of_its_own(group: Group, shares: tuple[int, ...]) -> Any:
    model = nn.Linear(6, 3)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    seen, table = torch.zeros(1), torch.full((3,), 1 / 3)
    model.register_buffer("seen", seen)
    model.register_buffer("table", table)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen.add_(float(len(x)))
        return nn.functional.cross_entropy(model(x), y)

    case = cases.Case(model, [torch.optim.SGD(model.parameters(), lr=0.1)], loss_fn)
    strategy = Updater(model, case.optimizers)
    strategy.bind(group, group.rank, group.size)
    cases.one_step(strategy, case, 0, shares, group.rank)
    found = float(seen), table.tolist(), strategy.gradients.state_digest()
    strategy.close()
    return found


def test_buffers_that_only_the_forward_knows(crew: Crew) -> None:
    found = crew.run(changes_a_buffer_of_its_own, (8, 4, 0))
    assert found == [found[0]] * 3
    assert found[0][0] == pytest.approx((8 * 8 + 4 * 4) / 12)
    assert found[0][1] == torch.full((3,), 1 / 3).tolist()


# -- what is found out -------------------------------------------------------------------------------------------------


def differs(group: Group, what: str) -> Any:
    case = cases.build("mlp")
    (optimizer,) = case.optimizers
    loss_fn = case.loss_fn
    if group.rank == 1 and what == "lr":
        optimizer.param_groups[0]["lr"] = 0.5
    if group.rank == 1 and what == "parameters":
        with torch.no_grad():
            case.modules[0].weight.add_(1.0)
    if group.rank == 1 and what == "weight":
        loss_fn = lambda x, y: (case.loss_fn(x, y), len(x))  # noqa: E731
    strategy = Updater(case.modules, case.optimizers, verify_every=1)
    strategy.bind(group, group.rank, group.size)
    before = strategy.gradients.state_digest()
    batch, samples = cases.share_of(0, (4, 4, 4), group.rank)
    operation = 9 if group.rank == 1 and what == "operation" else 0
    contribution = strategy.compute(loss_fn, batch, samples=samples, total=12, step=0)
    try:
        strategy.exchange(contribution, Notice(operation))
    except (Disagreement, Diverged) as error:
        assert strategy.gradients.state_digest() == before
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    finally:
        strategy.close()


@pytest.mark.parametrize(
    ("what", "kind", "pattern"),
    [
        ("lr", "Disagreement", r"rank 1\).*lr of AdamW 0, group 0 is 0.01 on rank 0, 0.5 on rank 1"),
        ("parameters", "Diverged", r"differ.*rank 1\)"),
        ("weight", "Disagreement", r"a weight on .*rank 1\), but none on .*rank 0\).*rank 2\)"),
        ("operation", "Disagreement", r"rank 1\) in 9"),
    ],
)
def test_workers_that_differ_are_named_on_all(crew: Crew, what: str, kind: str, pattern: str) -> None:
    found = crew.run(differs, what)
    assert found == [found[0]] * 3
    assert found[0][0] == kind
    assert re.search(pattern, found[0][1]), found[0][1]
    if kind == "Diverged":
        assert found[0][2] == (1,)


def not_finite(group: Group, bad_rank: int, value: float) -> Any:
    case = cases.build("normalised")
    strategy = Updater(case.modules, case.optimizers, SessionOptions(nonfinite="skip"))
    strategy.bind(group, group.rank, group.size)
    before = strategy.gradients.state_digest()
    batch, samples = cases.share_of(0, (6, 4, 2), group.rank)
    if group.rank == bad_rank:
        batch[0][1, 2] = value
    contribution = strategy.compute(case.loss_fn, batch, samples=samples, total=12, step=0)
    agreement = strategy.exchange(contribution, Notice(0))
    strategy.apply(agreement)
    same = strategy.gradients.state_digest() == before
    cases.one_step(strategy, case, 1, (6, 4, 2), group.rank)
    went_on = strategy.gradients.state_digest()
    strategy.close()
    return agreement.counts, agreement.nonfinite, agreement.reason, same, went_on


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_not_applied_and_named(crew: Crew, value: float) -> None:
    found = crew.run(not_finite, 1, value)
    assert found == [found[0]] * 3
    counts, nonfinite, reason, same, _ = found[0]
    assert not counts
    assert same
    assert [rank for rank, _ in nonfinite] == [1]
    assert nonfinite[0][1] in cases.state(cases.build("normalised")) or nonfinite[0][1].count(".") == 1
    assert "rank 1)" in reason


def overflows(group: Group) -> Any:
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    strategy = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1))
    strategy.bind(group, group.rank, group.size)
    x = torch.full((1, 1), 3e38)  # two thirds of it from each are finite, their sum is not
    contribution = strategy.compute(lambda x: (model(x).mean(), 2.0), (x,), samples=1, total=3, step=0)
    agreement = strategy.exchange(contribution, Notice(0))
    strategy.close()
    return agreement.counts, agreement.nonfinite, agreement.reason


def test_a_sum_that_overflows_is_said_to(crew: Crew) -> None:
    for counts, nonfinite, reason in crew.run(overflows):
        assert not counts
        assert nonfinite == ()
        assert "overflowed" in reason


# -- the header by itself ----------------------------------------------------------------------------------------------


def exchange_rows(group: Group) -> Any:
    flags = Flag.LEAVING if group.rank == 2 else 0
    row = Row(7, held=group.rank // 2, flags=int(flags), weight=0.1 * group.rank, weighted_loss=-float("inf"))
    rows = exchange(group, row)
    texts = exchange_text(group, b"" if group.rank == 0 else b"rank" * group.rank)
    return list(rows), texts


def test_rows_arrive_bit_for_bit(crew: Crew) -> None:
    found = crew.run(exchange_rows)
    assert found == [found[0]] * 3
    rows, texts = found[0]
    assert [row.weight for row in rows] == [0.0, 0.1, 0.2]
    assert all(row.weighted_loss == -float("inf") for row in rows)
    assert [row.held for row in rows] == [0, 0, 1]
    assert [row.flags for row in rows] == [0, 0, int(Flag.LEAVING)]
    assert texts == [b"", b"rank", b"rankrank"]


# -- deaths ------------------------------------------------------------------------------------------------------------


def survive(group: Group) -> Any:
    """Rank 2 says that it is there and dies in its second step; the others do the step again with its samples."""
    case = cases.build("normalised")
    strategy = Updater(case.modules, case.optimizers)
    strategy.bind(group, group.rank, group.size)
    cases.one_step(strategy, case, 0, (6, 4, 2), group.rank)
    if group.rank == 2:
        say("first step done")
        group.recv(torch.zeros(1), 0)  # never comes
    before = strategy.gradients.state_digest()
    try:
        cases.one_step(strategy, case, 1, (6, 4, 2), group.rank)
        raise AssertionError("a step with a dead member was complete")
    except PeerLost as error:
        following = group.regroup([rank for rank in range(group.size) if rank != error.rank])
    assert strategy.gradients.state_digest() == before, "a failed attempt left a trace"
    old = strategy._store
    strategy.bind(following, following.rank, following.size)
    assert strategy._store is not old, "buckets of the old group may still be written to"
    assert all(parameter.grad is None for parameter in case.modules.parameters())
    cases.one_step(strategy, case, 1, (7, 5), following.rank)
    found = cases.state(case), strategy.gradients.state_digest()
    strategy.close()
    following.close()
    group.close()
    return found


def test_a_step_is_done_again_without_the_dead() -> None:
    with Crew(3) as crew:
        crew.start(survive)
        crew.hear(2)
        crew.kill(2)
        (first, first_digest), (_, second_digest) = crew.finish([0, 1])
    assert first_digest == second_digest
    assert first[".1.num_batches_tracked"] == 2


def interrupted(group: Group) -> Any:
    """The session's check ends an attempt in the middle of backward; the next one is as if it had not been."""

    class Doomed(GroupError):
        pass

    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise Doomed("a member died")

    case = cases.build("normalised")
    strategy = Updater(case.modules, case.optimizers, check=check)
    strategy.bind(group, group.rank, group.size)
    before = strategy.gradients.state_digest()
    batch, samples = cases.share_of(0, (6, 4, 2), group.rank)
    with pytest.raises(Doomed):
        strategy.compute(case.loss_fn, batch, samples=samples, total=12, step=0)
    assert strategy.gradients.state_digest() == before
    assert all(parameter.grad is None for parameter in case.modules.parameters())
    cases.one_step(strategy, case, 0, (6, 4, 2), group.rank)
    found = strategy.gradients.state_digest()
    strategy.close()
    return found


def test_an_interrupted_attempt_leaves_no_trace(crew: Crew) -> None:
    expected = crew.run(cases.train_with, "normalised", (6, 4, 2), 1, {})
    assert crew.run(interrupted) == [each["digest"] for each in expected]


def divide_differently(group: Group) -> str:
    case = cases.build("normalised")
    strategy = Updater(case.modules, case.optimizers)
    strategy.bind(group, group.rank, group.size)
    batch, samples = cases.share_of(0, (6, 4, 2), group.rank)
    found = strategy.compute(case.loss_fn, batch, samples=samples, total=12, step=1)
    try:
        strategy.exchange(found, Notice(1, shares=7 if group.rank == 1 else 5))
        return "went on"
    except Disagreement as error:
        return str(error)
    finally:
        strategy.close()


def test_workers_that_divide_a_batch_differently_all_stop() -> None:
    with Crew(3) as crew:
        said = crew.run(divide_differently)
    assert all("workers divide this batch of 12 differently" in text and "(rank 1)" in text for text in said)
