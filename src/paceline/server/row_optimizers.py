"""The update rules of sparse tables, on the rows that a push names.

A rule gets the rows and their state, gathered and in one floating type, with the gradients, and changes rows and state
in place; gradients stay as they are. What a rule does to a row depends on that row alone, so a push may be cut
anywhere.

- They are the rules of torch.optim, operation by operation: with gradients for all rows in every step the result is
  the same.
- They are lazy: rows that got no gradient do not move, do not decay, and forget nothing, as in torch.optim.SparseAdam.
- `step` counts the updates of the whole table from 1, as there; a row that is seen for the first time in step 1000
  gets the bias correction of step 1000.
- Row-wise rules keep the second moment of a row as one number: of the mean over the row of the squares.
- State begins with zeros. Adagrad's `initial_accumulator_value` is added where the sum is used, not kept in it.
- An epsilon of 0 and a gradient of 0 make a row NaN, as in torch.optim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from paceline.server.spec import TableSpec

State = Mapping[str, torch.Tensor]


class Hyper(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one update, named as in the `param_groups` of torch.optim. Which of them count depends on the
    optimizer; defaults are torch's where all agree, and Adam's where not."""

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    maximize: bool = False
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False

    def __post_init__(self) -> None:
        for field in ("lr", "momentum", "weight_decay", "lr_decay", "initial_accumulator_value", "eps"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field}={value}; use a number, 0 or more")
        if not math.isfinite(self.dampening):
            raise ValueError(f"dampening={self.dampening}; use a number")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}; use numbers from 0 to below 1")
        if self.nesterov and (self.momentum == 0 or self.dampening != 0):
            raise ValueError(
                f"nesterov=True with momentum={self.momentum} and dampening={self.dampening}; "
                "it needs a momentum and no dampening"
            )

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> Hyper:
        """From a group of torch.optim; what is no setting of the update (`params`, `foreach`, ...) is left out."""
        known = {name: group[name] for name in cls.__struct_fields__ if group.get(name) is not None}
        known["betas"] = tuple(float(beta) for beta in known.get("betas", (0.9, 0.999)))
        # Schedulers may keep it as a tensor.
        known["lr"] = float(known["lr"])
        return cls(**known)


def state_widths(spec: TableSpec) -> dict[str, int]:
    """The state of a row by torch's name for it: how many numbers each takes."""
    second = 1 if spec.rowwise else spec.dim
    if spec.optimizer == "sgd":
        return {"momentum_buffer": spec.dim} if spec.momentum else {}
    if spec.optimizer == "adagrad":
        return {"sum": second}
    widths = {"exp_avg": spec.dim, "exp_avg_sq": second}
    if spec.amsgrad:
        widths["max_exp_avg_sq"] = second
    return widths


def check(spec: TableSpec, hyper: Hyper, step: int) -> None:
    """Refuse an update that the table keeps no state for."""
    if step < 1:
        raise ValueError(f"table {spec.name!r}: step={step}; updates are counted from 1")
    if hyper.momentum and spec.optimizer == "sgd" and not spec.momentum:
        raise ValueError(
            f"table {spec.name!r} keeps no momentum, and a push has momentum={hyper.momentum}; "
            "make the table with momentum=True"
        )
    if hyper.amsgrad and not spec.amsgrad:
        raise ValueError(
            f"table {spec.name!r} keeps no maximum, and a push has amsgrad=True; make the table with amsgrad=True"
        )


def update(spec: TableSpec, rows: torch.Tensor, grads: torch.Tensor, state: State, hyper: Hyper, step: int) -> None:
    """Change rows [n, dim] and their state [n, width] in place."""
    if hyper.maximize:
        grads = grads.neg()
    if hyper.weight_decay and spec.optimizer != "adamw":
        grads = grads.add(rows, alpha=hyper.weight_decay)
    _RULES[spec.optimizer](rows, grads, state, hyper, step)


def _sgd(rows: torch.Tensor, grads: torch.Tensor, state: State, hyper: Hyper, step: int) -> None:
    if hyper.momentum:
        buffer = state["momentum_buffer"]
        if step == 1:
            # The first gradient is not damped.
            buffer.copy_(grads)
        else:
            buffer.mul_(hyper.momentum).add_(grads, alpha=1 - hyper.dampening)
        grads = grads.add(buffer, alpha=hyper.momentum) if hyper.nesterov else buffer
    rows.add_(grads, alpha=-hyper.lr)


def _adagrad(rows: torch.Tensor, grads: torch.Tensor, state: State, hyper: Hyper, step: int) -> None:
    total = state["sum"]
    _add_squares(total, grads, 1)
    started = total.add(hyper.initial_accumulator_value) if hyper.initial_accumulator_value else total
    divisor = started.sqrt().add_(hyper.eps)
    rows.addcdiv_(grads, divisor, value=-hyper.lr / (1 + (step - 1) * hyper.lr_decay))


def _adamw(rows: torch.Tensor, grads: torch.Tensor, state: State, hyper: Hyper, step: int) -> None:
    rows.mul_(1 - hyper.lr * hyper.weight_decay)
    _adam(rows, grads, state, hyper, step)


def _adam(rows: torch.Tensor, grads: torch.Tensor, state: State, hyper: Hyper, step: int) -> None:
    beta1, beta2 = hyper.betas
    first, second = state["exp_avg"], state["exp_avg_sq"]
    first.lerp_(grads, 1 - beta1)
    second.mul_(beta2)
    _add_squares(second, grads, 1 - beta2)
    if hyper.amsgrad:
        highest = state["max_exp_avg_sq"]
        second = torch.maximum(highest, second, out=highest)
    divisor = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(hyper.eps)
    rows.addcdiv_(first, divisor, value=-hyper.lr / (1 - beta1**step))


def _add_squares(total: torch.Tensor, grads: torch.Tensor, weight: float) -> None:
    """Of each element, or the mean of them where the total is one number a row."""
    dim = grads.shape[1]
    if total.shape[1] == dim:
        total.addcmul_(grads, grads, value=weight)
    else:
        # A product with a vector of equal weights: several times faster than a mean over short rows.
        total.addmm_(grads.square(), grads.new_full((dim, 1), weight / dim))


_RULES: dict[str, Callable[[torch.Tensor, torch.Tensor, State, Hyper, int], None]] = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "adam": _adam,
    "adamw": _adamw,
}
