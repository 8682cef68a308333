"""The dense ranges of a server: their values, and the optimizer that updates them.

A block is one range: a slice of the parameters of one *section* (the parameters of one type in one group of one
optimizer). The optimizer is torch's own, one instance a block, so that what it does is what it does anywhere. Only
optimizers that treat every element by itself can be cut into ranges; the others are refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

# Those whose update of an element depends on nothing but that element's gradients, and on the settings.
ELEMENTWISE: dict[str, type[torch.optim.Optimizer]] = {
    kind.__name__: kind
    for kind in (
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
    )
}

Value = float | int | bool | None | tuple[float, ...]


class Settings(msgspec.Struct, frozen=True, array_like=True):
    """Which optimizer a section has, and what its group says: learning rate, betas and so on."""

    optimizer: str
    values: dict[str, Value]

    def __post_init__(self) -> None:
        if self.optimizer not in ELEMENTWISE:
            raise ValueError(
                f"{self.optimizer} cannot run on servers, which hold parts of parameters; "
                f"use one of {', '.join(ELEMENTWISE)}"
            )


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Settings:
    """Those of one group, as they are now."""
    known = _arguments_of(type(optimizer))
    values: dict[str, Value] = {}
    for name in known & group.keys():
        value = group[name]
        if isinstance(value, torch.Tensor):
            value = value.item()
        if name in ("foreach", "fused", "capturable", "differentiable"):
            continue
        values[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return Settings(type(optimizer).__name__, values)


def _arguments_of(kind: type[torch.optim.Optimizer]) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "params"}


class Block:
    """One dense range. `values` belongs to the block."""

    def __init__(self, values: torch.Tensor, section: int, settings: Settings) -> None:
        self.section = section
        self.values = values
        self._parameter = torch.nn.Parameter(values, requires_grad=True)
        kind = ELEMENTWISE[settings.optimizer]
        arguments: dict[str, Any] = dict(settings.values)
        if "fused" in _arguments_of(kind) and values.is_floating_point():
            arguments["fused"] = True  # one pass over memory instead of several
        self._optimizer = kind([self._parameter], **arguments)
        self._settings = settings

    def update(self, gradient: torch.Tensor, settings: Settings, unused: Sequence[tuple[int, int]] = ()) -> None:
        """`unused` are parts (from, to) that got no gradient: they do not move, decay or forget."""
        if unused:
            self._update_but_for(gradient, settings, unused)
            return
        if settings != self._settings:
            self._optimizer.param_groups[0].update(settings.values)
            self._settings = settings
        self._parameter.grad = gradient
        self._optimizer.step()
        self._parameter.grad = None

    def whole(self, gradient: torch.Tensor, offset: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
        """The gradient of a part as one of the whole, and the parts that have none."""
        size, stop = self.values.numel(), offset + gradient.numel()
        if gradient.numel() == size:
            return gradient, []
        if offset < 0 or stop > size:
            raise ValueError(f"a gradient of elements {offset} to {stop} for a range of {size} elements")
        padded = torch.zeros_like(self.values)
        padded[offset:stop] = gradient
        return padded, [part for part in ((0, offset), (stop, size)) if part[0] < part[1]]

    def _update_but_for(self, gradient: torch.Tensor, settings: Settings, unused: Sequence[tuple[int, int]]) -> None:
        kept = [
            (name, low, high, value[low:high].clone())
            for name, value in {"": self.values, **self.state()}.items()
            if value.dim()
            for low, high in unused
        ]
        self.update(gradient, settings)
        now = {"": self.values, **self.state()}
        for name, low, high, value in kept:
            now[name][low:high] = value

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps; empty before the first update."""
        return {name: value for name, value in self._optimizer.state[self._parameter].items() if value is not None}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        for name, value in state.items():
            if name != "step" and value.shape != self.values.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, its range {tuple(self.values.shape)}")
        if state:
            own = self._optimizer.state[self._parameter]
            own.clear()
            own.update({name: value.reshape(()) if name == "step" else value for name, value in state.items()})
            if "momentum_buffer" not in own and type(self._optimizer) is torch.optim.SGD:
                own["momentum_buffer"] = None

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + sum(value.nbytes for value in self.state().values())
