"""What the tensors of a letter are: which slice of which tensor belongs to which range, which table's rows they are.

The same descriptions serve requests of workers, forwards and snapshots between servers, and checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import torch

from paceline.server.dense import OptimizerSettings
from paceline.server.spec import TableSpec


class Slice(msgspec.Struct, frozen=True, array_like=True):
    """A dense range, or the part of it from `offset` on, in a tensor: `length` elements from `start`."""

    number: int
    tensor: int
    start: int
    length: int
    offset: int = 0


class Partitions(msgspec.Struct, frozen=True, array_like=True):
    """The ranges that hold the rows of tables: `count` of them, a power of two, from number `first`. Equal ids of
    different tables are in the same one."""

    first: int
    count: int

    def has(self, number: int) -> bool:
        """Whether a range is one of them."""
        return 0 <= number - self.first < self.count

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """The range of each id: by bits of a product, which tables do not look at."""
        bits = self.count.bit_length() - 1
        if not bits:
            return torch.full_like(ids, self.first)
        return ((ids * _SPREAD >> (64 - bits)) & (self.count - 1)) + self.first


_SPREAD = -7046029254386353131  # 2**64 divided by the golden ratio, odd, as an int64


class TableRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of a table: which tensor has the ids, and which the values or gradients."""

    table: str
    ids: int
    rows: int


class Refresh(msgspec.Struct, frozen=True, array_like=True):
    """Rows that somebody pulled when a table had the version `since`: those that have changed are wanted."""

    table: str
    ids: int
    since: int


class Making(msgspec.Struct, frozen=True, array_like=True):
    """A dense range as it is made: where its values are, and what its optimizer keeps, by name."""

    values: Slice
    section: int
    state: dict[str, Slice] = {}


class TableChunk(msgspec.Struct, frozen=True, array_like=True):
    """Part of a table with everything that is kept for its rows, by name of what is kept. `idle` is -1 where nobody
    counts for how long they were not touched."""

    table: str
    ids: int
    tensors: dict[str, int]
    idle: int = -1


class WaitingChunk(msgspec.Struct, frozen=True, array_like=True):
    """Ids of a table that have no row yet: the numbers of the tensors."""

    table: str
    ids: int
    counts: int
    idle: int


class StagedPush(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has pushed for a step and what is not committed yet."""

    generation: int
    step: int
    rank: int
    dense: tuple[Slice, ...] = ()
    rows: tuple[TableRows, ...] = ()


class Squares(msgspec.Struct, frozen=True, array_like=True):
    """The sum of the squares of what is staged for a step, added up over its ranks, is wanted in the first wanted
    tensor, one float64 for each range of the request."""

    generation: int
    step: int
    num_ranks: int


class Detail(msgspec.Struct, frozen=True):
    """Of one letter. Every field may be empty.

    dense, rows       gradients that are pushed
    wants, row_wants  values that are pulled: the numbers of tensors there are those of the tensors to be filled, but
                      for `TableRows.ids`, which is one that was sent; rows that are not there are made if `makes_rows`
    stamps            the number of the tensor to be filled with the version of the table of each of `row_wants`; -1 of
                      a table that did not give all of them
    refreshes         rows that are wanted if they have changed, as `rows` of the answer: there `TableRows.ids` are
                      positions. What is not wholly here is not answered
    makes, chunks,    ranges and rows that are loaded, and ids that wait for a row, with `sections` and `tables` that
    waiting           they belong to; ids belong to ranges as `partitions` says, which are as of
                      the update of the number `clock`
    staged            in a snapshot
    exports           everything of these ranges is wanted, as `makes` and `chunks` of the answer
    """

    dense: tuple[Slice, ...] = ()
    rows: tuple[TableRows, ...] = ()
    wants: tuple[Slice, ...] = ()
    row_wants: tuple[TableRows, ...] = ()
    makes_rows: bool = True
    stamps: int = -1
    refreshes: tuple[Refresh, ...] = ()
    makes: tuple[Making, ...] = ()
    sections: tuple[OptimizerSettings, ...] = ()
    tables: tuple[TableSpec, ...] = ()
    partitions: Partitions | None = None
    chunks: tuple[TableChunk, ...] = ()
    waiting: tuple[WaitingChunk, ...] = ()
    clock: int = 0
    staged: tuple[StagedPush, ...] = ()
    exports: bool = False
    squares: Squares | None = None


class TableSettings(msgspec.Struct, frozen=True, array_like=True):
    """What the group of a table's optimizer says now, by the names that torch has for it."""

    table: str
    values: dict[str, float | int | bool | tuple[float, ...] | None]


class UpdateSettings(msgspec.Struct, frozen=True, array_like=True):
    """What comes with a commit or an applied push: the settings of each section and each table, and the parts of dense
    ranges that got no gradient: those stay as they are."""

    sections: tuple[OptimizerSettings, ...] = ()
    tables: tuple[TableSettings, ...] = ()
    unused: tuple[Slice, ...] = ()


@dataclass
class Parcel:
    """A detail with its tensors. `wanted` are those to be filled; `written` the ranges whose wants are filled. `answer`
    is what came back, if more was asked for than to fill tensors, and `given` are the ranges of which it counts: of
    others, which moved meanwhile, another server has the say."""

    detail: Detail = field(default_factory=Detail)
    tensors: list[torch.Tensor] = field(default_factory=list)
    wanted: list[torch.Tensor] = field(default_factory=list)
    written: set[int] = field(default_factory=set)
    answer: Parcel | None = None
    given: tuple[int, ...] = ()

    def slice(self, where: Slice) -> torch.Tensor:
        return self.tensors[where.tensor].view(-1)[where.start : where.start + where.length]

    def wanted_slice(self, where: Slice) -> torch.Tensor:
        return self.wanted[where.tensor].view(-1)[where.start : where.start + where.length]


class Packing:
    """Collects tensors and gives each its number."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def slice(self, number: int, tensor: torch.Tensor) -> Slice:
        return Slice(number, self.add(tensor), 0, tensor.numel())
