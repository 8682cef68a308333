"""The row optimizers are those of torch.optim, applied to the rows that a push names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.server.row_optimizers import Hyper, check, state_widths, update
from paceline.server.spec import TableSpec

NUM_ROWS, DIM, NUM_STEPS = 24, 8, 12

CASES: list[tuple[str, type[torch.optim.Optimizer], dict[str, Any]]] = [
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.02}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01, "eps": 1e-6}),
    ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.3, "maximize": True}),
    ("adam", torch.optim.Adam, {"lr": 0.01}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-5, "weight_decay": 0.1}),
    ("adam", torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
]
NAMES = [f"{name} {settings}" for name, _, settings in CASES]


def spec_of(name: str, group: dict[str, Any], **fields: Any) -> TableSpec:
    return TableSpec(
        name="t",
        dim=DIM,
        optimizer=name,  # type: ignore[arg-type]
        momentum=name == "sgd" and bool(group["momentum"]),
        amsgrad=bool(group.get("amsgrad")),
        **fields,
    )


def state_of(spec: TableSpec) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(NUM_ROWS, width) for name, width in state_widths(spec).items()}


def gradients(seed: int) -> torch.Tensor:
    return torch.randn(NUM_ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def push(
    spec: TableSpec,
    rows: torch.Tensor,
    state: dict[str, torch.Tensor],
    ids: torch.Tensor,
    grads: torch.Tensor,
    hyper: Hyper,
    step: int,
) -> None:
    some, some_state = rows[ids], {name: value[ids] for name, value in state.items()}
    update(spec, some, grads[ids], some_state, hyper, step)
    rows[ids] = some
    for name, value in state.items():
        value[ids] = some_state[name]


@pytest.mark.parametrize(("name", "kind", "settings"), CASES, ids=NAMES)
def test_all_rows_in_every_step_are_as_in_torch(
    name: str, kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    dense = torch.nn.Parameter(gradients(99).clone())
    theirs = kind([dense], **settings)
    group = theirs.param_groups[0]
    spec, rows = spec_of(name, group), dense.detach().clone()
    state = state_of(spec)
    for step in range(1, NUM_STEPS + 1):
        dense.grad = gradients(step)
        given = dense.grad.clone()
        theirs.step()
        update(spec, rows, given, state, Hyper.of(group), step)
        assert torch.equal(given, gradients(step))
    # An initial value is added last here and first there; all else is the same operation on the same numbers.
    tolerance = 1e-6 if settings.get("initial_accumulator_value") else 0.0
    torch.testing.assert_close(rows, dense.detach(), rtol=tolerance, atol=tolerance)
    for key, value in state.items():
        kept = theirs.state[dense][key] - settings.get("initial_accumulator_value", 0.0)
        torch.testing.assert_close(value, kept, rtol=1e-6, atol=1e-6)


def some_of(step: int) -> torch.Tensor:
    chosen = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(1000 + step))
    return chosen[: 1 + step % 7]


@pytest.mark.parametrize("settings", [{"lr": 0.01}, {"lr": 0.02, "betas": (0.7, 0.9), "eps": 1e-10}])
def test_adam_of_some_rows_is_sparse_adam(settings: dict[str, Any]) -> None:
    parameter = torch.nn.Parameter(gradients(99).clone())
    theirs = torch.optim.SparseAdam([parameter], **settings)
    spec, rows = TableSpec(name="t", dim=DIM, optimizer="adam"), parameter.detach().clone()
    state = state_of(spec)
    for step in range(1, 40):
        ids, grads = some_of(step), gradients(step)
        parameter.grad = torch.sparse_coo_tensor(ids[None], grads[ids], (NUM_ROWS, DIM), check_invariants=True)
        theirs.step()  # type: ignore[no-untyped-call]
        push(spec, rows, state, ids, grads, Hyper.of(theirs.param_groups[0]), step)
    # It adds epsilon before the correction of the second moment, not after; that is all the difference.
    torch.testing.assert_close(rows, parameter.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["exp_avg"], theirs.state[parameter]["exp_avg"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "kind", "settings"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.1}),
        ("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    ],
)
def test_some_rows_are_as_in_torch_where_a_zero_gradient_changes_nothing(
    name: str, kind: type[torch.optim.Optimizer], settings: dict[str, Any]
) -> None:
    dense = torch.nn.Parameter(gradients(99).clone())
    theirs = kind([dense], **settings)
    group = theirs.param_groups[0]
    spec, rows = spec_of(name, group), dense.detach().clone()
    state = state_of(spec)
    for step in range(1, 40):
        ids, grads = some_of(step), gradients(step)
        dense.grad = torch.zeros(NUM_ROWS, DIM)
        dense.grad[ids] = grads[ids]
        theirs.step()
        push(spec, rows, state, ids, grads, Hyper.of(group), step)
    assert torch.equal(rows, dense.detach())


@pytest.mark.parametrize("name", [name for name, _, _ in CASES])
def test_rows_without_a_gradient_stay(name: str) -> None:
    group = {"lr": 0.1, "momentum": 0.9 if name == "sgd" else 0.0, "weight_decay": 0.1}
    spec, rows = spec_of(name, group), gradients(99)
    state = state_of(spec)
    push(spec, rows, state, torch.arange(NUM_ROWS), gradients(1), Hyper.of(group), 1)
    before, kept = rows.clone(), {key: value.clone() for key, value in state.items()}
    ids = torch.tensor([3, 5])
    push(spec, rows, state, ids, gradients(2), Hyper.of(group), 2)
    others = torch.ones(NUM_ROWS, dtype=torch.bool)
    others[ids] = False
    assert torch.equal(rows[others], before[others])
    assert not torch.isclose(rows[ids], before[ids]).any()
    assert all(torch.equal(value[others], kept[key][others]) for key, value in state.items())


def test_rowwise_adagrad() -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer="adagrad", rowwise=True)
    hyper = Hyper(lr=0.1, eps=1e-6, lr_decay=0.1, initial_accumulator_value=0.2)
    rows, state = gradients(99), state_of(spec)
    expected, sums = rows.double(), torch.zeros(NUM_ROWS, dtype=torch.float64)
    for step in range(1, 30):
        ids, grads = some_of(step), gradients(step)
        push(spec, rows, state, ids, grads, hyper, step)
        for row in ids.tolist():
            grad = grads[row].double()
            sums[row] += (grad**2).mean()
            expected[row] -= 0.1 / (1 + 0.1 * (step - 1)) * grad / ((0.2 + sums[row]).sqrt() + 1e-6)
    assert state["sum"].shape == (NUM_ROWS, 1)
    torch.testing.assert_close(rows, expected.float(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["sum"][:, 0], sums.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_rowwise_adam(name: Any, amsgrad: bool) -> None:
    spec = TableSpec(name="t", dim=DIM, optimizer=name, rowwise=True, amsgrad=amsgrad)
    hyper = Hyper(lr=0.01, betas=(0.8, 0.9), weight_decay=0.1, amsgrad=amsgrad)
    rows, state = gradients(99), state_of(spec)
    expected = rows.double()
    first, second, highest = expected * 0, torch.zeros(NUM_ROWS).double(), torch.zeros(NUM_ROWS).double()
    for step in range(1, 30):
        ids, grads = some_of(step), gradients(step) * (3.0 if step < 5 else 0.5)
        push(spec, rows, state, ids, grads, hyper, step)
        for row in ids.tolist():
            grad = grads[row].double()
            if name == "adam":
                grad = grad + 0.1 * expected[row]
            else:
                expected[row] *= 1 - 0.01 * 0.1
            first[row] = 0.8 * first[row] + 0.2 * grad
            second[row] = 0.9 * second[row] + 0.1 * (grad**2).mean()
            highest[row] = max(highest[row], second[row])
            divisor = ((highest if amsgrad else second)[row] / (1 - 0.9**step)).sqrt() + 1e-8
            expected[row] -= 0.01 / (1 - 0.8**step) * first[row] / divisor
    assert state["exp_avg_sq"].shape == (NUM_ROWS, 1)
    torch.testing.assert_close(rows, expected.float(), rtol=1e-5, atol=1e-6)


def test_a_group_is_taken_as_it_is() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = torch.optim.AdamW([parameter], lr=torch.tensor(0.25), amsgrad=True).param_groups[0]
    hyper = Hyper.of(group)
    assert hyper == Hyper(lr=0.25, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8, amsgrad=True)


@pytest.mark.parametrize(
    ("field", "value"),
    [("lr", float("nan")), ("lr", -1.0), ("eps", -1e-8), ("weight_decay", float("inf")), ("betas", (0.9, 1.0))],
)
def test_settings_that_make_no_sense_are_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field}="):
        Hyper(**{"lr": 0.1, field: value})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="nesterov"):
        Hyper(lr=0.1, nesterov=True)


def test_state_that_the_table_does_not_keep_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum=True"):
        check(TableSpec(name="t", dim=1, optimizer="sgd"), Hyper(lr=0.1, momentum=0.9), 1)
    with pytest.raises(ValueError, match="amsgrad=True"):
        check(TableSpec(name="t", dim=1, optimizer="adam"), Hyper(lr=0.1, amsgrad=True), 1)
    with pytest.raises(ValueError, match="step=0"):
        check(TableSpec(name="t", dim=1), Hyper(lr=0.1), 0)
