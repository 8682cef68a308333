"""Validation over all workers, exact: each sample counts once, nothing is padded, every worker gets the same numbers.

`validate` gets a batch as `loss_fn` does and returns a dict of names and values for it:

    a number or a 0-d tensor     the mean over the samples of the batch; the result is the mean over all samples
    `Total(value)`               the result is the sum
    `Every(tensor)`              one row a sample; the result is all rows, in the order of the data

Partial results are added in float64, batch by batch, and over workers in order of rank: the same bits on each. A
worker without samples takes part with nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from paceline.collective import Group
from paceline.strategy.loss_calls import spread
from paceline.wire.decoding import decode

Validate = Callable[..., Mapping[str, Any]]


class Total:
    """A value of `validate` to be summed over all samples.

    >>> def validate(x, y):
    ...     return {"errors": paceline.Total((model(x).argmax(1) != y).sum())}
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Every:
    """A row for each sample, to be collected over all of them: for metrics that need all predictions at once.

    >>> def validate(x, y):
    ...     return {"scores": paceline.Every(model(x))}
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows


class _Sum(msgspec.Struct):
    kind: str
    value: float = 0.0
    weight: float = 0.0


class Scores:
    """Results of one worker, batch by batch."""

    def __init__(self) -> None:
        self._sums: dict[str, _Sum] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}

    def add(self, result: Mapping[str, Any], samples: int) -> None:
        if not isinstance(result, Mapping):
            raise TypeError(
                f"validate returned {type(result).__name__}; return a dict of names and values, as {{'loss': loss}}"
            )
        for name, value in result.items():
            if isinstance(value, Every):
                self._add_rows(name, value.rows, samples)
            elif isinstance(value, Total):
                self._sum(name, "total").value += _number(name, value.value)
            else:
                mean = self._sum(name, "mean")
                mean.value += _number(name, value) * samples
                mean.weight += samples

    def _sum(self, name: str, kind: str) -> _Sum:
        found = self._sums.setdefault(name, _Sum(kind))
        if found.kind != kind:
            raise ValueError(f"{name!r} is a {kind} in one batch and a {found.kind} in another")
        return found

    def _add_rows(self, name: str, rows: torch.Tensor, samples: int) -> None:
        if rows.ndim == 0 or len(rows) != samples:
            raise ValueError(f"{name!r} is Every({tuple(rows.shape)}) for {samples} samples; give one row a sample")
        self._rows.setdefault(name, []).append(rows.detach().cpu())

    def agree(self, group: Group | None, exchange: Callable[[bytes], list[bytes]]) -> dict[str, Any]:
        """The results over all workers."""
        mine = {name: torch.cat(rows).contiguous() for name, rows in self._rows.items()}
        shapes = {name: (str(rows.dtype).removeprefix("torch."), list(rows.shape)) for name, rows in mine.items()}
        said = exchange(msgspec.msgpack.encode((self._sums, shapes)))
        everybody = [decode(text, tuple[dict[str, _Sum], Shapes]) for text in said]
        results: dict[str, Any] = {}
        for sums, _ in everybody:
            for name in sums:
                results.setdefault(name, _combine(name, [other.get(name) for other, _ in everybody]))
        for _, shapes_of_rank in everybody:
            for name in shapes_of_rank:
                if name not in results:
                    results[name] = _collect(group, mine.get(name), [other.get(name) for _, other in everybody])
        return results


Shapes = dict[str, tuple[str, list[int]]]


def _combine(name: str, parts: list[_Sum | None]) -> float:
    present = [part for part in parts if part is not None]
    if len({part.kind for part in present}) > 1:
        raise ValueError(f"{name!r} is a mean on one worker and a total on another")
    value = math.fsum(part.value for part in present)
    weight = math.fsum(part.weight for part in present)
    if present[0].kind == "total":
        return value
    return value / weight if weight else math.nan


def _collect(
    group: Group | None, mine: torch.Tensor | None, shapes: list[tuple[str, list[int]] | None]
) -> torch.Tensor:
    """The rows of all ranks, in order of rank: ranks have consecutive parts of the data."""
    dtype_name, (_, *row_shape) = next(shape for shape in shapes if shape is not None)
    dtype = getattr(torch, dtype_name)
    counts = [shape[1][0] if shape is not None else 0 for shape in shapes]
    if mine is None:
        mine = torch.empty((0, *row_shape), dtype=dtype)
    if group is None:
        return mine
    parts = [torch.empty((count, *row_shape), dtype=dtype) for count in counts]
    group.all_gather(parts, mine)
    return torch.cat(parts)


def _number(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{name!r} has the shape {tuple(value.shape)}; give one number a batch, or Every(...)")
        return float(value.detach())
    return float(value)


def evaluate(validate: Validate, batches: Any, check: Callable[[], None]) -> Scores:
    """Call `validate` for each batch of (value, samples)."""
    scores = Scores()
    with torch.no_grad():
        for value, samples in batches:
            check()
            scores.add(spread(validate, value, "validate"), samples)
    return scores
