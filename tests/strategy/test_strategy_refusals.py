"""What the strategy refuses, by name and with a remedy."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from paceline.errors import StrategyError
from paceline.strategy import Contribution, Updater, loss_calls
from paceline.strategy.options import SessionOptions
from tests.strategy import cases


def linear() -> nn.Linear:
    return nn.Linear(6, 3)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lazy() -> nn.Module:
    return nn.LazyLinear(3)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Embedding(5, 2, sparse=True), "sparse=False"),
        (lambda: nn.Linear(2, 2, device="meta"), "meta"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no parameter is trainable"),
        (lazy, "no shape yet"),
    ],
)
def test_models_that_are_refused(model: Any, message: str) -> None:
    made = model()
    with pytest.raises(ValueError, match=message):
        Updater(made, sgd(made))


def test_optimizers_that_are_refused() -> None:
    model = linear()
    with pytest.raises(ValueError, match="LBFGS"):
        Updater(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match="SparseAdam"):
        Updater(model, torch.optim.SparseAdam(model.parameters()))
    with pytest.raises(ValueError, match="no optimizer"):
        Updater(model, [])
    with pytest.raises(ValueError, match="optimizers 0 and 1 are the same"):
        Updater(model, [one := sgd(model), one])
    with pytest.raises(ValueError, match="optimizers 0 and 1 share a parameter"):
        Updater(model, [sgd(model), sgd(model)])
    with pytest.raises(ValueError, match="no optimizer has a parameter of the model"):
        Updater(model, sgd(linear()))


@pytest.mark.parametrize("setting", [{"clip_norm": 0.0}, {"micro_batch": 0}, {"nonfinite": "maybe"}])
def test_settings_that_are_refused(setting: dict[str, Any]) -> None:
    model = linear()
    with pytest.raises(ValueError, match=next(iter(setting))):
        Updater(model, sgd(model), SessionOptions(**setting))


def test_a_device_that_is_not_supported_is_named() -> None:
    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 0)

    model = linear()
    model.weight = Elsewhere(torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"parameters on cuda are not supported yet: Paceline reduces CPU tensors"):
        Updater(model, sgd(model))


def test_a_sparse_gradient_that_nobody_announced() -> None:
    table = nn.Parameter(torch.randn(5, 3))
    model = nn.ParameterList([table])
    strategy = Updater(model, sgd(model))

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(nn.functional.embedding(y, table, sparse=True), y)

    with pytest.raises(StrategyError, match="0 got a sparse gradient"):
        strategy.compute(loss_fn, cases.batch_of(0), samples=12, total=12, step=0)


def test_a_step_of_the_script_is_refused() -> None:
    model = linear()
    optimizer = sgd(model)
    strategy = Updater(model, optimizer)
    before = strategy.gradients.state_digest()
    with pytest.raises(StrategyError, match=r"SGD.step\(\) was called by the script"):
        optimizer.step()
    assert strategy.gradients.state_digest() == before
    cases.one_step(strategy, cases.Case(model, [optimizer], lambda x, y: cross_entropy(model(x), y)), 0, (12,), 0)
    assert strategy.gradients.state_digest() != before
    strategy.close()
    optimizer.step()


def a_step(strategy: Updater, model: nn.Module, step: int) -> Contribution:
    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(model(x), y)

    return strategy.compute(loss_fn, cases.batch_of(step), samples=12, total=12, step=step)


def test_a_layer_that_is_replaced_without_its_optimizer_is_refused() -> None:
    layer = nn.Linear(3, 3)
    model = nn.Sequential(nn.Linear(6, 3), layer)
    strategy = Updater(model, sgd(model))
    a_step(strategy, model, 1)
    layer.weight.data = torch.zeros(3, 3)  # new values are welcome
    a_step(strategy, model, 2)
    model[1] = nn.Linear(3, 3)
    with pytest.raises(StrategyError, match=r"1.weight of the model is another one than when the session was made"):
        a_step(strategy, model, 3)


def test_a_layer_that_is_replaced_before_the_first_step_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    strategy = Updater(model, sgd(model))
    model[0] = nn.Linear(6, 3)
    with pytest.raises(StrategyError, match=r"the parameter 0.weight .* no optimizer has it"):
        strategy.bind(None, 0, 1)


def test_a_layer_that_is_added_is_found_within_some_steps() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    strategy = Updater(model, sgd(model), verify_every=4)
    model.append(nn.Linear(3, 3))
    for step in range(1, 4):
        a_step(strategy, model, step)
    with pytest.raises(StrategyError, match=r"the parameter 1.weight of the model was not there"):
        a_step(strategy, model, 4)


def test_a_layer_that_is_replaced_in_its_optimizer_too_is_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    optimizer = sgd(model)
    strategy = Updater(model, optimizer)
    a_step(strategy, model, 1)
    model[0] = nn.Linear(6, 3)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    assert a_step(strategy, model, 2).used == (True, True)


def test_parameters_that_are_used_now_and_then_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = nn.Linear(6, 3), nn.Linear(6, 3)
    model = nn.ModuleList([first, second])
    strategy = Updater(model, sgd(model))
    looked: list[int] = []
    monkeypatch.setattr(strategy.gradients, "check_known", lambda: looked.append(1))
    for step in range(1, 9):
        a_step(strategy, (first, second)[step % 2], step)
    assert len(looked) == 2


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        ((1,), r"1 value is passed as 1 argument: write def loss_fn\(x\)"),
        ([1, 2], r"2 values is passed as 2 arguments: write def loss_fn\(x, y\)"),
        ((1, 2, 3), r"3 arguments: write def loss_fn\(x0, x1, x2\)"),
        ({"ids": 1, "labels": 2}, r"a dict is passed as one argument: write def loss_fn\(batch\)"),
        (torch.zeros(2), r"a Tensor is passed as one argument: write def loss_fn\(batch\)"),
    ],
)
def test_a_loss_function_of_another_signature_is_told_the_one_that_is_wanted(batch: Any, says: str) -> None:
    def loss_fn(*, ids: Any, labels: Any) -> None:
        raise AssertionError("it is not called")

    @functools.wraps(loss_fn)
    def decorated(*values: Any, **named: Any) -> None:
        loss_fn(*values, **named)

    for function in (loss_fn, decorated, functools.partial(loss_fn, ids=1)):
        with pytest.raises(TypeError, match=says):
            loss_calls.spread(function, batch)
    with pytest.raises(TypeError, match=says.replace("loss_fn", "validate")):
        loss_calls.spread(loss_fn, batch, "validate")


def test_a_type_error_in_a_loss_function_stays_its_own() -> None:
    with pytest.raises(TypeError, match=r"^unsupported operand"):
        loss_calls.spread(lambda x, y: x + y, (1, "a"))
