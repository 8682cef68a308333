"""BatchNorm over the samples of all workers: the sums of its layers, and what cannot be exchanged."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as functional
from torch import nn

from paceline.collective import Group
from paceline.errors import StrategyError
from paceline.strategy import Updater, batch_norm, buckets, overlap
from paceline.strategy.batch_norm import SyncedNorms, judge_roll
from paceline.strategy.options import SessionOptions
from paceline.testing.crew import Crew, Raised
from tests.strategy import cases


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(3, hosts="aab") as made:
        made.run(with_small_buckets)
        yield made


def with_small_buckets(group: Group) -> None:
    buckets.BUCKET_BYTES = 100  # so that there are several, and backward could send some early


# -- one layer, beside torch's own -------------------------------------------------------------------------------------


def lone(sums: torch.Tensor, is_backward: bool) -> torch.Tensor:
    return sums


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (6, 3)),
        (nn.BatchNorm1d(3, affine=False, momentum=None), (6, 3, 5)),
        (nn.BatchNorm2d(3, track_running_stats=False), (2, 3, 4, 5)),
        (nn.BatchNorm2d(3, momentum=0.5), (2, 3, 4, 5)),
        (nn.BatchNorm3d(3), (2, 3, 2, 4, 5)),
    ],
    ids=str,
)
def test_a_layer_alone_gives_what_torch_gives(layer: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, other = (copy.deepcopy(layer).to(torch.float32 if dtype == torch.bfloat16 else dtype) for _ in range(2))
    x = (torch.randn(shape) * torch.rand(shape) + 3.0).to(dtype).requires_grad_()
    y = x.detach().clone().requires_grad_()
    direction = torch.randn(shape).to(dtype)
    rough: Any = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    for _ in range(2):
        mine, theirs = batch_norm._forward(layer, lone, x), other(y)  # type: ignore[arg-type]
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, **rough)
        for out in (mine, theirs):
            (out * direction).sum().backward()
    torch.testing.assert_close(x.grad, y.grad, **rough)
    for (name, one), two in zip(layer.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, two, msg=name, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    for a, b in zip(layer.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, **(rough | {"rtol": 5e-2} if dtype == torch.bfloat16 else rough))


def test_a_mean_that_is_far_off_does_not_drown_the_variance() -> None:
    x = torch.randn(64, 2) + 1000.0
    found = batch_norm._forward(nn.BatchNorm1d(2), lone, x)
    exact = functional.batch_norm(x.double(), None, None, training=True).float()
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)


def test_a_layer_that_is_not_in_training_exchanges_nothing() -> None:
    def refuse(sums: torch.Tensor, is_backward: bool) -> torch.Tensor:
        raise AssertionError("an exchange")

    x = torch.randn(4, 2)
    layer = nn.BatchNorm1d(2).eval()
    torch.testing.assert_close(batch_norm._forward(layer, refuse, x), layer(x))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        batch_norm._forward(layer.train(), lone, x[:1])


# -- several workers ---------------------------------------------------------------------------------------------------


def train_and_watch(group: Group, shares: tuple[int, ...], options: dict[str, Any]) -> Any:
    made: list[str] = []
    original = overlap.Overlapped.__init__

    def noted(self: overlap.Overlapped, *arguments: Any) -> None:
        made.append("overlapped")
        original(self, *arguments)

    overlap.Overlapped.__init__ = noted  # type: ignore[method-assign, assignment]
    try:
        return cases.train(group, "normalised", shares, 5, **options) | {"made": made}
    finally:
        overlap.Overlapped.__init__ = original  # type: ignore[method-assign]


@pytest.mark.parametrize("shares", [(7, 4, 1), (4, 4, 4), (0, 12, 0)], ids=str)
def test_workers_come_to_what_one_process_comes_to(crew: Crew, shares: tuple[int, ...]) -> None:
    """Also where one of them has all samples, and nothing is exchanged."""
    found = crew.run(train_and_watch, shares, {"batch_norm": "sync"})
    expected = cases.by_hand("normalised", 5)
    assert len({each["digest"] for each in found}) == 1
    for key, value in found[0]["state"].items():
        numpy.testing.assert_allclose(value, expected["state"][key], rtol=2e-4, atol=2e-6, err_msg=key)
    assert found[0]["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def test_between_hosts_no_bucket_is_sent_before_backward_is_done(crew: Crew) -> None:
    """It would come between other exchanges on each worker."""
    assert all(each["made"] for each in crew.run(train_and_watch, (4, 4, 4), {}))
    assert not any(each["made"] for each in crew.run(train_and_watch, (4, 4, 4), {"batch_norm": "sync"}))


def test_pieces_of_equal_number_go_together(crew: Crew) -> None:
    found = crew.run(train_and_watch, (4, 4, 4), {"batch_norm": "sync", "micro_batch": 2})
    assert len({each["digest"] for each in found}) == 1


@pytest.mark.parametrize(
    ("shares", "options", "says"),
    [
        ((8, 4, 0), {}, r"step 0: .*\(rank 2\) has a share of 0 samples"),
        ((8, 2, 2), {"micro_batch": 2}, r"step 0: .*\(rank 1\) .* 2 samples in 1 pieces, .*\(rank 0\) its 8 in 4"),
    ],
)
def test_what_does_not_go_together_is_an_error_on_all(
    crew: Crew, shares: tuple[int, ...], options: dict[str, Any], says: str
) -> None:
    crew.start(train_and_watch, shares, {"batch_norm": "sync"} | options)
    for each in crew.outcomes():
        assert isinstance(each, Raised)
        with pytest.raises(StrategyError, match=says):
            raise each.error
    assert crew.run(train_and_watch, (4, 4, 4), {"batch_norm": "sync"})[0]["losses"], "the group is as good as before"


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_roll_is_judged_alike_by_all() -> None:
    def name_of(rank: int) -> str:
        return f"rank {rank}"

    assert judge_roll([(3, 1), (1, 1)], name_of) == ""
    assert judge_roll([(0, 0), (9, 4), (0, 0)], name_of) == "", "one has all"
    assert judge_roll([(6, 3), (4, 3)], name_of) == ""
    assert "rank 1 has a share of 0" in judge_roll([(3, 1), (0, 0), (1, 1)], name_of)
    assert "rank 0 computes its 3 samples in 1 pieces, rank 1 its 4 in 2" in judge_roll([(3, 1), (4, 2)], name_of)


class Own(nn.BatchNorm1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1.0


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (Own(2), "0 is a Own with a forward of its own"),
        (nn.SyncBatchNorm(2), "0 is a SyncBatchNorm with a forward of its own"),
        (torch.jit.script(nn.BatchNorm1d(2)), "0 is compiled"),
    ],
)
def test_layers_that_cannot_be_reached_are_refused(layer: nn.Module, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        SyncedNorms({"": nn.Sequential(layer)})


def test_memory_that_does_not_suffice_and_a_weight_of_nothing_are_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))
    strategy = Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), SessionOptions(batch_norm="sync"))
    x, y = cases.batch_of(0)

    def exhaust(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    with pytest.raises(StrategyError, match="step 4: memory does not suffice for 12 samples"):
        strategy.compute(exhaust, (x, y), samples=12, total=12, step=4)
    with pytest.raises(StrategyError, match="step 4: loss_fn returned the weight 0"):
        strategy.compute(
            lambda x, y: (functional.cross_entropy(model(x), y), 0.0), (x, y), samples=12, total=12, step=4
        )
    with pytest.raises(ValueError, match="batch_norm='global'"):
        Updater(model, torch.optim.SGD(model.parameters(), lr=0.1), SessionOptions(batch_norm="global"))  # type: ignore[arg-type]
