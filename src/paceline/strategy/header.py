"""The header of an operation: one row for each rank, of which every rank sees all.

Each rank writes its own row into a block of zeros and the block is all-reduced by sum, so that every row arrives bit
for bit. What is computed from the rows, in order of rank, has therefore the same bits on all ranks, and whatever
follows from them (an error too) happens on all or on none. It needs no strategy: `exchange` alone serves operations
that are no steps.

Invariant: rows of different operations never pass for one another; `exchange` raises `Disagreement` on all.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from paceline.collective import Group
from paceline.errors import Disagreement
from paceline.watch import spans

_LAYOUT = struct.Struct("<10q5d")
_MAX_TEXT_BYTES = 1 << 20


class Row(NamedTuple):
    """What one rank says. Digests are below 2**63; 0 means that there is none."""

    operation: int
    held: int = 0
    flags: int = 0
    hyper: int = 0  # digest of the hyper-parameters
    sampled: int = 0  # digest of sampled parameters
    used: int = 0  # digest of the set of parameters that got a gradient
    changed: int = 0  # digest of the set of buffers that changed
    samples: int = 0
    shares: int = 0  # digest of how the batch is divided
    limit: int = 0  # the most samples that fit into memory at once, 0 for all
    weight: float = 0.0
    weighted_loss: float = 0.0
    squares: float = 0.0  # of the gradient, over this rank's slice
    busy_s: float = 0.0  # since the reduction of the step before; 0 if that says nothing of this rank's speed
    reduced_s: float = 0.0  # the reduction of the step before


class HeaderRows(Sequence[Row]):
    """By rank. `names` says who is who, for messages."""

    def __init__(self, rows: Sequence[Row], names: Callable[[int], str] = lambda rank: f"rank {rank}") -> None:
        self._rows = tuple(rows)
        self._flags = functools.reduce(operator.or_, (row.flags for row in self._rows), 0)
        self.name_of = names

    def any(self, flag: int) -> bool:
        return bool(self._flags & flag)

    def all(self, flag: int) -> bool:
        return all(row.flags & flag for row in self._rows)

    def total(self, field: str) -> float:
        """The sum over ranks, in order of rank."""
        total = 0.0
        for row in self._rows:
            total += getattr(row, field)
        return total

    def __getitem__(self, rank: int) -> Row:  # type: ignore[override]
        return self._rows[rank]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({self._rows!r})"


def exchange(group: Group | None, row: Row) -> HeaderRows:
    """Every rank's row; alone, one's own. All members call it with the row of the same operation."""
    if group is None or group.size == 1:
        return HeaderRows((row,))
    memory = bytearray(group.size * _LAYOUT.size)
    block = torch.frombuffer(memory, dtype=torch.int64)
    _LAYOUT.pack_into(memory, group.rank * _LAYOUT.size, *row)
    before = spans.mark("header")
    group.all_reduce(block)
    spans.mark(before)
    rows = HeaderRows([Row(*fields) for fields in _LAYOUT.iter_unpack(memory)], lambda rank: describe(group, rank))
    if any(other.operation != row.operation for other in rows):
        each = ", ".join(f"{rows.name_of(rank)} in {other.operation}" for rank, other in enumerate(rows))
        raise Disagreement(f"members are in different operations: {each}; every one must take part in each")
    return rows


def exchange_text(group: Group, text: bytes) -> list[bytes]:
    """Every rank's text: for explanations, where time does not count."""
    if len(text) > _MAX_TEXT_BYTES:
        text = text[:_MAX_TEXT_BYTES]
    lengths = torch.zeros(group.size, dtype=torch.int64)
    lengths[group.rank] = len(text)
    group.all_reduce(lengths)
    block = torch.zeros(group.size, max(1, int(lengths.max())), dtype=torch.uint8)
    if text:
        block[group.rank, : len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.all_reduce(block)
    return [block[rank, :length].numpy().tobytes() for rank, length in enumerate(lengths.tolist())]


def describe(group: Group | None, rank: int) -> str:
    if group is None:
        return f"rank {rank}"
    card = group.cards[rank]
    return f"{card.role} {card.member} (rank {rank})"
