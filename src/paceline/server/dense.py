"""The dense ranges of a server: their values, and the optimizer that updates them.

A block is one range: a slice of the parameters of one *section* (the parameters of one type in one group of one
optimizer). The optimizer is torch's own, one instance a block, so that what it does is what it does anywhere. Only
optimizers that treat every element by itself can be cut into ranges; the others are refused by name.
"""

from __future__ import annotations

import bisect
import inspect
import itertools
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

# What an optimizer keeps once for a parameter, not for each of its elements, and where it begins.
COUNTS = {"step": 0.0, "mu_product": 1.0}

Value = float | int | bool | None | tuple[float, ...]


class OptimizerSettings(msgspec.Struct, frozen=True, array_like=True):
    """Which optimizer a section has, and what its group says: learning rate, betas and so on."""

    optimizer: str
    values: dict[str, Value]

    def __post_init__(self) -> None:
        if self.optimizer not in ELEMENTWISE:
            raise _cannot_be_cut(self.optimizer)


def settings_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> OptimizerSettings:
    """Those of one group, as they are now."""
    if ELEMENTWISE.get(type(optimizer).__name__) is not type(optimizer):  # one of the script's may have a name of torch
        raise _cannot_be_cut(f"{type(optimizer).__module__}.{type(optimizer).__name__}")
    known = _arguments_of(type(optimizer))
    values: dict[str, Value] = {}
    for name in known & group.keys():
        value = group[name]
        if isinstance(value, torch.Tensor):
            value = value.item()
        if name in ("foreach", "fused", "capturable", "differentiable"):
            continue
        values[name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return OptimizerSettings(type(optimizer).__name__, values)


def _cannot_be_cut(name: str) -> ValueError:
    return ValueError(
        f"{name} cannot run on servers, which hold parts of parameters; use one of {', '.join(ELEMENTWISE)}"
    )


def _arguments_of(kind: type[torch.optim.Optimizer]) -> set[str]:
    return set(inspect.signature(kind.__init__).parameters) - {"self", "params"}


class Block:
    """One dense range. `values` belongs to the block. To torch it is one parameter, until parts of it get no gradient:
    from then on those are parameters of their own, with their own count of updates, as they are on a worker."""

    def __init__(self, values: torch.Tensor, section: int, settings: OptimizerSettings) -> None:
        self.section = section
        self.values = values
        kind = ELEMENTWISE[settings.optimizer]
        arguments: dict[str, Any] = dict(settings.values)
        if "fused" in _arguments_of(kind) and values.is_floating_point():
            arguments["fused"] = True  # one pass over memory instead of several
        self._optimizer = kind([torch.nn.Parameter(values)], **arguments)
        self._bounds = [0, values.numel()]  # of the pieces
        self._settings = settings

    @property
    def _pieces(self) -> list[torch.nn.Parameter]:
        pieces: list[torch.nn.Parameter] = self._optimizer.param_groups[0]["params"]
        return pieces

    def update(
        self, gradient: torch.Tensor, settings: OptimizerSettings, unused: Sequence[tuple[int, int]] = ()
    ) -> None:
        """`unused` are parts (from, to) that got no gradient: they do not move, decay or forget."""
        if settings != self._settings:
            self._optimizer.param_groups[0].update(settings.values)
            self._settings = settings
        for bound in {bound for part in unused for bound in part}:
            self._split(bound)
        going_on: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        beginning: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        for piece, (low, high) in zip(self._pieces, itertools.pairwise(self._bounds), strict=True):
            if not any(start <= low and high <= stop for start, stop in unused):
                has_begun = any(value is not None for value in self._optimizer.state.get(piece, {}).values())
                (going_on if has_begun else beginning).append((piece, gradient[low:high]))
        for pieces in (going_on, beginning):  # torch's fused SGD takes momentum of all pieces at once, or of none
            if pieces:
                self._step(pieces)

    def _step(self, pieces: Sequence[tuple[torch.nn.Parameter, torch.Tensor]]) -> None:
        for piece, gradient in pieces:
            piece.grad = gradient
        self._optimizer.step()
        self._optimizer.zero_grad()

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

    def _split(self, bound: int) -> None:
        if bound in self._bounds:
            return
        number = bisect.bisect(self._bounds, bound) - 1
        low, high = self._bounds[number : number + 2]
        old = self._pieces[number]
        halves = [torch.nn.Parameter(self.values[low:bound]), torch.nn.Parameter(self.values[bound:high])]
        state = self._optimizer.state.pop(old, {})
        for half, part in zip(halves, (slice(0, bound - low), slice(bound - low, high - low)), strict=True):
            if state:
                self._optimizer.state[half] = {name: _part_of(value, part) for name, value in state.items()}
        self._pieces[number : number + 1] = halves
        self._bounds.insert(number + 1, bound)

    def state(self) -> dict[str, torch.Tensor]:
        """What the optimizer keeps, one value an element; one for all where all have the same. Empty before the first
        update, but for an optimizer that begins with something."""
        states = [self._optimizer.state.get(piece, {}) for piece in self._pieces]
        names = dict.fromkeys(name for state in states for name, value in state.items() if value is not None)
        lengths = [piece.numel() for piece in self._pieces]
        return {name: joined(name, [state.get(name) for state in states], lengths) for name in names}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        size = self.values.numel()
        for name, value in state.items():
            if value.numel() != size and (name not in COUNTS or value.numel() != 1):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, its range {tuple(self.values.shape)}")
        counts = [value for name, value in state.items() if name in COUNTS and value.numel() > 1]
        for value in counts:
            for bound in (value.diff().nonzero().view(-1) + 1).tolist():
                self._split(bound)
        if not state:
            return
        for piece, (low, high) in zip(self._pieces, itertools.pairwise(self._bounds), strict=True):
            own = self._optimizer.state[piece]
            own.clear()
            for name, value in state.items():
                flat = value.reshape(-1)
                own[name] = flat[low if len(flat) > 1 else 0].clone() if name in COUNTS else flat[low:high].clone()
            if "momentum_buffer" not in own and type(self._optimizer) is torch.optim.SGD:
                own["momentum_buffer"] = None

    @property
    def num_bytes(self) -> int:
        states = self._optimizer.state.values()
        kept: list[torch.Tensor] = [value for state in states for value in state.values() if value is not None]
        return self.values.nbytes + sum(value.nbytes for value in kept)


def joined(name: str, values: Sequence[torch.Tensor | None], lengths: Sequence[int]) -> torch.Tensor:
    """What an optimizer keeps under a name for several parameters, flat, as one for all of their elements. Who has
    nothing yet begins with nothing."""
    if name not in COUNTS:
        like = next(value for value in values if value is not None)
        return torch.cat(
            [
                torch.zeros(length, dtype=like.dtype) if value is None else value.reshape(-1)
                for value, length in zip(values, lengths, strict=True)
            ]
        )
    first = torch.tensor(COUNTS[name])
    counts = [first if value is None else value.detach().reshape(()) for value in values]
    if all(torch.equal(count, counts[0]) for count in counts[1:]):
        return counts[0].reshape(1).clone()
    return torch.cat([count.expand(length) for count, length in zip(counts, lengths, strict=True)])


def _part_of(value: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    if value is None:
        return None
    return value.clone() if value.dim() == 0 else value[part].clone()
