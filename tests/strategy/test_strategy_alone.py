"""The strategy in one process: how `loss_fn` is called, what leaves no trace, what is refused."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from paceline.errors import GroupError, StrategyError
from paceline.strategy import Agreement, Notice, Updater
from paceline.strategy.buckets import lay_out
from paceline.strategy.header import Row, exchange
from paceline.strategy.loss_calls import piece_sizes, pieces
from paceline.strategy.numerics import Examined
from paceline.strategy.options import SessionOptions
from tests.strategy import cases


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(6, 3)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def step(strategy: Updater, loss_fn: Any, batch: Any, *, number: int = 0, samples: int = 12) -> Agreement:
    contribution = strategy.compute(loss_fn, batch, samples=samples, total=samples, step=number)
    agreement = strategy.exchange(contribution, Notice(number))
    strategy.apply(agreement)
    return agreement


# -- equal to plain torch ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(cases.CASES))
def test_alone_it_is_plain_torch(name: str) -> None:
    found, expected = cases.train(None, name, (cases.TOTAL,), 3), cases.by_hand(name, 3)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for key, value in found["state"].items():
        assert value == pytest.approx(expected["state"][key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize("name", ["mlp", "weighted", "several_types"])
def test_clipping_alone(name: str) -> None:
    found = cases.train(None, name, (cases.TOTAL,), 3, clip_norm=0.1, micro_batch=5)
    expected = cases.by_hand(name, 3, clip_norm=0.1)
    for key, value in found["state"].items():
        assert value == pytest.approx(expected["state"][key], rel=1e-4, abs=1e-6), key


# -- calling loss_fn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "single"])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_the_form_of_the_batch_is_the_form_of_the_call(form: str, micro_batch: int | None) -> None:
    model, (x, y) = linear(), cases.batch_of(0)
    strategy = Updater(model, sgd(model), SessionOptions(micro_batch=micro_batch))
    both = torch.cat([x, y[:, None].float()], dim=1)
    batch: Any = {"tuple": (x, y), "list": [x, y], "dict": {"y": y, "x": x}, "single": both}[form]

    def of_two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    def of_one(both: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(both[:, :6]), both[:, 6].long())

    def of_dict(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return of_two(batch["x"], batch["y"])

    found = step(strategy, {"single": of_one, "dict": of_dict}.get(form, of_two), batch)
    assert found.loss == pytest.approx(float(cross_entropy(linear()(x), y).detach()), rel=1e-5)
    assert found.total_weight == 12


def test_what_can_be_cut_is_cut() -> None:
    batch = {"x": torch.arange(5), "nested": [torch.arange(10).view(5, 2), {"deep": torch.arange(5)}], "none": None}
    batch["names"] = ["a", "b", "c", "d", "e"]
    cut = list(pieces(batch, piece_sizes(5, 2)))
    assert [samples for _, samples in cut] == [2, 2, 1]
    assert cut[1][0]["x"].tolist() == [2, 3]
    assert cut[1][0]["nested"][1]["deep"].tolist() == [2, 3]
    assert cut[2][0]["names"] == ["e"]
    assert cut[2][0]["none"] is None
    ((first, _), _) = pieces(UserDict(x=torch.arange(4)), [2, 2])
    assert type(first) is UserDict, "what loss_fn gets is of the kind that the loader gave"
    assert first["x"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(12, 2), torch.zeros(3)), r"batch\[1\] has shape \(3,\)"),
        ({"x": torch.zeros(12), "k": torch.tensor(1.0)}, r"batch\['k'\] has shape \(\)"),
        ((torch.zeros(12), 7), r"batch\[1\] is int"),
        (object(), "batch is object"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        list(pieces(batch, piece_sizes(12, 5)))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda loss: 1.0, "returned float"),
        (lambda loss: loss.expand(3), r"shape \(3,\)"),
        (lambda loss: loss.detach(), "no trainable parameter"),
        (lambda loss: (loss, 1.0, 2.0), "3 values"),
        (lambda loss: (loss, -1.0), "weight -1.0"),
        (lambda loss: (loss, float("nan")), "weight nan"),
    ],
)
def test_what_loss_fn_must_not_return(result: Any, message: str) -> None:
    model = linear()
    strategy = Updater(model, sgd(model))
    before = strategy.gradients.state_digest()
    with pytest.raises((ValueError, TypeError), match=message):
        step(strategy, lambda x, y: result(cross_entropy(model(x), y)), cases.batch_of(0))
    assert strategy.gradients.state_digest() == before
    assert step(strategy, lambda x, y: cross_entropy(model(x), y), cases.batch_of(0)).counts


def test_some_weights_and_some_not_is_an_error() -> None:
    model = linear()
    strategy = Updater(model, sgd(model), SessionOptions(micro_batch=6))
    results = iter([True, False])

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = cross_entropy(model(x), y)
        return (loss, 1.0) if next(results) else loss

    with pytest.raises(ValueError, match="for some micro-batches"):
        step(strategy, loss_fn, cases.batch_of(0))


def test_no_weight_at_all_is_an_error() -> None:
    model = linear()
    strategy = Updater(model, sgd(model))
    with pytest.raises(StrategyError, match="sum to 0"):
        step(strategy, lambda x, y: (cross_entropy(model(x), y) * float("nan"), 0), cases.batch_of(0))


def test_zero_grad_and_backward_in_loss_fn_are_harmless() -> None:
    expected = cases.by_hand("mlp", 1)
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers, SessionOptions(micro_batch=5))

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        case.loss_fn(x, y).backward()
        case.optimizers[0].zero_grad(set_to_none=len(x) == 5)
        return case.loss_fn(x, y)  # type: ignore[no-any-return]

    step(strategy, loss_fn, cases.batch_of(0))
    case.optimizers[0].zero_grad()
    for key, value in cases.state(case).items():
        assert value == pytest.approx(expected["state"][key], rel=1e-4, abs=1e-6)


# -- leaving no trace --------------------------------------------------------------------------------------------------


def test_random_numbers_depend_on_seed_step_and_rank_only() -> None:
    model = linear()
    strategy = Updater(model, sgd(model), SessionOptions(micro_batch=5))
    drawn: list[list[float]] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        drawn[-1].append(float(torch.rand(())))
        return cross_entropy(model(x), y)

    torch.manual_seed(99)
    expected_outside = torch.rand(3)
    torch.manual_seed(99)
    random.seed(99)
    python_state = random.getstate()
    for number in (0, 0, 1):
        drawn.append([])
        strategy.compute(loss_fn, cases.batch_of(0), samples=12, total=12, step=number)
    assert torch.equal(torch.rand(3), expected_outside)
    assert random.getstate() == python_state
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    assert len(set(drawn[0])) == 3, "the next micro-batch goes on where the last one ended"


class Doomed(GroupError):
    pass


@pytest.mark.parametrize("at_call", [1, 3, 6])
def test_check_ends_an_attempt_cleanly(at_call: int) -> None:
    case = cases.build("normalised")
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == at_call:
            raise Doomed("a member died")

    strategy = Updater(case.modules, case.optimizers, SessionOptions(micro_batch=6), check=check)
    before, outer = strategy.gradients.state_digest(), torch.default_generator.get_state()
    with pytest.raises(Doomed):
        step(strategy, case.loss_fn, cases.batch_of(0))
    assert strategy.gradients.state_digest() == before
    assert torch.equal(torch.default_generator.get_state(), outer)
    assert all(parameter.grad is None for parameter in case.modules.parameters())
    step(strategy, case.loss_fn, cases.batch_of(0))
    other = cases.build("normalised")
    step(Updater(other.modules, other.optimizers, SessionOptions(micro_batch=6)), other.loss_fn, cases.batch_of(0))
    for key, value in cases.state(case).items():
        assert (value == cases.state(other)[key]).all(), key


def test_only_apply_changes_buffers() -> None:
    case = cases.build("normalised")
    strategy = Updater(case.modules, case.optimizers)
    before = strategy.gradients.state_digest()
    for _ in range(3):
        contribution = strategy.compute(case.loss_fn, cases.batch_of(0), samples=12, total=12, step=0)
    agreement = strategy.exchange(contribution, Notice(0))
    assert strategy.gradients.state_digest() == before
    strategy.apply(agreement)
    assert strategy.gradients.state_digest() != before
    assert case.modules[1].num_batches_tracked == 1
    assert strategy.gradients.has_batch_statistics()


def test_a_buffer_that_is_replaced_is_put_back() -> None:
    model: Any = linear()
    model.register_buffer("average", torch.zeros(2))
    original = model.average

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        model.average = model.average + 1
        return cross_entropy(model(x), y)

    strategy = Updater(model, sgd(model))
    contribution = strategy.compute(loss_fn, cases.batch_of(0), samples=12, total=12, step=0)
    assert model.average is original
    assert original.tolist() == [0.0, 0.0]
    strategy.apply(strategy.exchange(contribution, Notice(0)))
    assert model.average.tolist() == [1.0, 1.0]
    assert not strategy.gradients.has_batch_statistics()


def test_what_is_void_is_refused() -> None:
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers)
    old = strategy.compute(case.loss_fn, cases.batch_of(0), samples=12, total=12, step=0)
    new = strategy.compute(case.loss_fn, cases.batch_of(0), samples=12, total=12, step=0)
    with pytest.raises(StrategyError, match="void"):
        strategy.exchange(old, Notice(0))
    agreement = strategy.exchange(new, Notice(0))
    strategy.apply(agreement)
    with pytest.raises(StrategyError, match="void"):
        strategy.apply(agreement)


# -- gradients that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_not_finite_alone(clip_norm: float | None) -> None:
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers, SessionOptions(clip_norm=clip_norm, nonfinite="skip"))
    before = strategy.gradients.state_digest()
    x, y = cases.batch_of(0)
    x[3, 3] = float("nan")
    agreement = step(strategy, case.loss_fn, (x, y))
    assert not agreement.counts
    assert agreement.nonfinite == ((0, "4.bias"),)
    assert "4.bias" in agreement.reason
    assert strategy.gradients.state_digest() == before
    assert step(strategy, case.loss_fn, cases.batch_of(0)).counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("wants_norm", [False, True])
def test_examining(dtype: torch.dtype, wants_norm: bool) -> None:
    def look(*values: float) -> Examined:
        examined = Examined(wants_norm=wants_norm)
        flat = torch.zeros(200_000, dtype=dtype)
        flat[: len(values)] = torch.tensor(values).to(dtype)
        examined.look(flat)
        return examined

    assert look(3.0, 4.0).finite
    assert look(3.0, 4.0).squares == pytest.approx(25.0 if wants_norm else 0.0)
    for value in (float("nan"), float("inf"), -float("inf")):
        assert not look(1.0, value).finite
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max if dtype != torch.float64 else 3e38
        assert look(largest, largest, largest).finite, "large is not infinite"


# -- the world of torch ------------------------------------------------------------------------------------------------


def test_a_parameter_that_thaws_is_trained() -> None:
    case = cases.build("mlp")
    case.modules[0].requires_grad_(False)
    strategy = Updater(case.modules, case.optimizers)
    before = case.modules[0].weight.detach().clone()
    step(strategy, case.loss_fn, cases.batch_of(0))
    assert torch.equal(case.modules[0].weight, before)
    case.modules[0].requires_grad_(True)
    step(strategy, case.loss_fn, cases.batch_of(1), number=1)
    assert not torch.equal(case.modules[0].weight, before)


def test_a_parameter_that_is_added_to_an_optimizer_is_trained() -> None:
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers)
    step(strategy, case.loss_fn, cases.batch_of(0))
    scale = torch.ones((), requires_grad=True)
    case.optimizers[0].add_param_group({"params": [scale]})
    step(strategy, lambda x, y: cross_entropy(case.modules(x) * scale, y), cases.batch_of(1), number=1)
    assert float(scale.detach()) != 1.0
    before = strategy.gradients.state_digest()
    with torch.no_grad():
        scale.add_(1.0)
    assert strategy.gradients.state_digest() != before


def test_reentrant_checkpointing_fires_hooks_twice() -> None:
    expected = cases.by_hand("mlp", 1)
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        again: Any = checkpoint
        first = again(case.modules, x, use_reentrant=True)
        second = again(case.modules, x, use_reentrant=True)
        return (cross_entropy(first, y) + cross_entropy(second, y)) / 2

    step(strategy, loss_fn, cases.batch_of(0))
    for key, value in cases.state(case).items():
        assert value == pytest.approx(expected["state"][key], rel=1e-4, abs=1e-6)


def test_autocast_in_loss_fn() -> None:
    case = cases.build("mlp")
    strategy = Updater(case.modules, case.optimizers)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case.loss_fn(x, y)  # type: ignore[no-any-return]

    exact = cases.by_hand("mlp", 1)["losses"][0]
    assert step(strategy, loss_fn, cases.batch_of(0)).loss == pytest.approx(exact, rel=0.02)
    assert case.modules[0].weight.grad.dtype == torch.float32


def test_a_compiled_model() -> None:
    """With the backend that traces as all do, but needs no C++ compiler and no half minute."""
    expected = cases.by_hand("mlp", 2)
    case = cases.build("mlp")
    compiled: Any = torch.compile(case.modules, backend="aot_eager")
    strategy = Updater(case.modules, case.optimizers)
    for number in range(2):
        step(strategy, lambda x, y: cross_entropy(compiled(x), y), cases.batch_of(number), number=number)
    for key, value in cases.state(case).items():
        assert value == pytest.approx(expected["state"][key], rel=1e-3, abs=1e-5)


def test_schedules_count_the_steps() -> None:
    model = linear()
    optimizer = sgd(model)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    strategy = Updater(model, optimizer)
    rates = []
    for number in range(3):
        contribution = strategy.compute(
            lambda x, y: cross_entropy(model(x), y), cases.batch_of(0), samples=12, total=12, step=number
        )
        agreement = strategy.exchange(contribution, Notice(number))
        rates.append(agreement.rows[0].hyper)
        strategy.apply(agreement)
        schedule.step()
    assert len(set(rates)) == 3, "the digest follows the schedule"


# -- parts -------------------------------------------------------------------------------------------------------------


def test_buckets_are_of_one_type_in_reverse_order() -> None:
    tensors = [torch.zeros(n, dtype=dtype) for n, dtype in [(100, torch.float32), (5, torch.float64)] * 3]
    layouts = lay_out(tensors, 600)
    seen = [place.number for layout in layouts for place in layout.places]
    assert sorted(seen) == list(range(6))
    for layout in layouts:
        assert [place.number for place in layout.places] == sorted((p.number for p in layout.places), reverse=True)
        for place in layout.places:
            assert tensors[place.number].dtype == layout.dtype
            assert place.start * layout.dtype.itemsize % 64 == 0
            assert place.start + place.size <= layout.size
    assert [len(layout.places) for layout in layouts if layout.dtype == torch.float32] == [2, 1]


def test_the_header_alone_is_its_own_row() -> None:
    row = Row(3, flags=5, weight=0.5)
    assert list(exchange(None, row)) == [row]
