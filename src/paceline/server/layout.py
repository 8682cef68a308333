"""How the parameters are cut into ranges; pure, and the same on all workers.

A *section* is a row of parameters of one type in one group of one optimizer, one behind the other: its elements are
updated by one rule. It is cut into ranges of about equal size, wherever parameters begin and end: large ones are split,
small ones packed. After the dense ranges come the partitions of the tables' ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.server.parcels import Partitions

MOST_ELEMENTS = 1 << 20  # of a range: enough to keep a core busy for a millisecond, little enough to be moved quickly
FEWEST_ELEMENTS = 1 << 14
FEW_RANGES = 32  # a model that is large enough has at least this many, for several servers to share
NUM_PARTITIONS = 64
PARTITION_BYTES = 4 << 20  # what a partition of tables counts for when ranges are placed; its rows are yet to come


class ParameterPart(NamedTuple):
    """One parameter in its section."""

    name: str
    parameter: torch.Tensor
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.parameter.numel()


class Section(NamedTuple):
    optimizer: int
    group: int
    dtype: torch.dtype
    parts: tuple[ParameterPart, ...]
    size: int


class DenseSpan(NamedTuple):
    """A dense range: where it is in its section."""

    section: int
    start: int
    stop: int


class RangeLayout(NamedTuple):
    sections: tuple[Section, ...]
    spans: tuple[DenseSpan, ...]
    partitions: Partitions | None

    @property
    def num_ranges(self) -> int:
        return len(self.spans) + (self.partitions.count if self.partitions is not None else 0)

    @property
    def weights(self) -> tuple[int, ...]:
        """The bytes of each range."""
        dense = [(span.stop - span.start) * self.sections[span.section].dtype.itemsize for span in self.spans]
        count = self.partitions.count if self.partitions is not None else 0
        return (*dense, *[PARTITION_BYTES] * count)

    def spans_of(self, name: str, start: int = 0, stop: int | None = None) -> list[tuple[int, int, int]]:
        """Where elements `start` to `stop` of a parameter are: (range, first element there, how many)."""
        for number, section in enumerate(self.sections):
            for part in section.parts:
                if part.name == name:
                    last = part.parameter.numel() if stop is None else stop
                    if not 0 <= start <= last <= part.parameter.numel():
                        raise ValueError(
                            f"{name} has {part.parameter.numel()} elements; {start} to {last} is no part of it"
                        )
                    return self._overlaps(number, part.start + start, part.start + last)
        raise ValueError(f"there is no parameter {name!r} on servers")

    def _overlaps(self, section: int, start: int, stop: int) -> list[tuple[int, int, int]]:
        found = []
        for number, span in enumerate(self.spans):
            low, high = max(start, span.start), min(stop, span.stop)
            if span.section == section and low < high:
                found.append((number, low - span.start, high - low))
        return found


def lay_out(
    parameters: Mapping[str, torch.Tensor], optimizers: Sequence[torch.optim.Optimizer], *, has_tables: bool
) -> RangeLayout:
    """`parameters` are those to be held by servers, by name."""
    owner = {
        id(parameter): (number, group_number)
        for number, optimizer in enumerate(optimizers)
        for group_number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    members: dict[tuple[int, int, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, parameter in parameters.items():
        if id(parameter) not in owner:
            raise ValueError(
                f"{name} is trained, but in no optimizer; give it to one, or set its requires_grad to False"
            )
        members.setdefault((*owner[id(parameter)], parameter.dtype), []).append((name, parameter))
    sections = tuple(_section(key, found) for key, found in sorted(members.items(), key=lambda one: str(one[0])))
    total = sum(section.size for section in sections)
    size = min(max(total // FEW_RANGES, FEWEST_ELEMENTS), MOST_ELEMENTS)
    spans = tuple(span for number, section in enumerate(sections) for span in _cut(number, section.size, size))
    return RangeLayout(sections, spans, Partitions(len(spans), NUM_PARTITIONS) if has_tables else None)


def _section(key: tuple[int, int, torch.dtype], members: Sequence[tuple[str, torch.Tensor]]) -> Section:
    parts, size = [], 0
    for name, parameter in members:
        parts.append(ParameterPart(name, parameter, size))
        size += parameter.numel()
    return Section(*key, tuple(parts), size)


def _cut(section: int, total: int, size: int) -> list[DenseSpan]:
    count = max(1, -(-total // size))
    bounds = [total * number // count for number in range(count + 1)]
    return [DenseSpan(section, low, high) for low, high in itertools.pairwise(bounds) if low < high]
