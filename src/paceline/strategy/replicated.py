"""Tables that every worker holds: each gets what all others have pushed, and makes the same update.

The gradients of all ranks are added up by id in the order of ranks, so all workers come to the same bits. This is
all-reduce for tables: simple, and as large as the memory of the smallest worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.collective import Group
from paceline.server.ages import Clocks
from paceline.server.chunk import Chunk, WaitingChunkIds
from paceline.server.merging import merged
from paceline.server.row_optimizers import Hyper
from paceline.server.rows import RowTable
from paceline.server.spec import TableSpec
from paceline.strategy.numerics import Examined
from paceline.strategy.sparse import RowGradients, Sparse

_CHUNK_ROWS = 1 << 16


class ReplicatedTables:
    def __init__(self, sparse: Sparse) -> None:
        self._sparse = sparse
        self._clocks = Clocks()
        self._tables = {spec.name: RowTable(spec, self._clocks) for spec in sparse.specs}
        self._group: Group | None = None
        self._gathered: RowGradients = {}
        self._decided: tuple[int, float] | None = None

    def bind(self, group: Group | None) -> None:
        self._group = group
        self._sparse.source = self

    def pull(self, wanted: Mapping[str, torch.Tensor], *, make: bool) -> dict[str, torch.Tensor]:
        # A row is made by its first update, on all workers alike; until then its value is its initial one.
        return {name: self._tables[name].pull(ids, make=False) for name, ids in wanted.items()}

    # -- a step ------------------------------------------------------------------------------------------------------

    def gather(self, rows: RowGradients, examined: Examined) -> None:
        """What all workers have for each table."""
        self._gathered = {}
        for spec in self._sparse.specs:
            empty = torch.empty(0, dtype=torch.int64), torch.empty((0, spec.dim), dtype=spec.torch_dtype)
            ids, gradients = rows.get(spec.name, empty)
            pairs = [(ids, gradients)] if self._group is None else _exchange(self._group, ids, gradients)
            pairs = [pair for pair in pairs if len(pair[0])]
            if pairs:
                self._gathered[spec.name] = merged(pairs)
                examined.look_finite(self._gathered[spec.name][1].reshape(-1))

    def squares(self) -> float:
        """All workers have all of it, so it is the same on all."""
        total = 0.0
        for _, gradients in self._gathered.values():
            total += float(gradients.double().square().sum())
        return total

    def decide(self, step: int, factor: float) -> None:
        self._decided = (step, factor)

    def apply(self) -> None:
        decided, self._decided = self._decided, None
        if decided is None or not self._tables:
            return
        step, factor = decided
        settings = {one.table: one.values for one in self._sparse.settings()}
        for name, (ids, gradients) in self._gathered.items():
            scaled = gradients if factor == 1.0 else gradients * factor
            self._tables[name].push(ids, scaled.contiguous(), Hyper.of(settings[name]), step)
        self._gathered = {}
        self._clocks.move_on((), step)
        for table in self._tables.values():
            table.sweep()

    # -- state -------------------------------------------------------------------------------------------------------

    def gift(self) -> dict[str, Any]:
        clock = self._clocks.newest
        return {
            "tables": {
                name: pack(list(table.export(_CHUNK_ROWS)), table.waiting(), clock)
                for name, table in self._tables.items()
            }
        }

    def full_state(self) -> dict[str, Any]:
        return {}  # a newcomer gets everything too

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return in_order(pack(list(self._tables[name].export(_CHUNK_ROWS))), self._tables[name].spec)

    def load(self, part: Mapping[str, Any]) -> None:
        tables = part.get("tables", {})
        self._clocks.start((), clock_of(tables))
        for spec in self._sparse.specs:
            table = RowTable(spec, self._clocks)
            tree = tables.get(spec.name, {})
            if (chunk := unpack(tree)) is not None:
                table.load(chunk)
            if (waiting := unpack_waiting(tree)) is not None:
                table.load_waiting(waiting)
            self._tables[spec.name] = table


def pack(chunks: Sequence[Chunk], waiting: WaitingChunkIds | None = None, clock: int = 0) -> dict[str, Any]:
    """Rows, and ids that wait for one, as a tree of tensors, as of the update of this number; empty if there are
    none."""
    tree: dict[str, Any] = {}
    if chunks:
        tree["ids"] = torch.cat([chunk.ids for chunk in chunks])
        tree["rows"] = torch.cat([chunk.rows for chunk in chunks])
        tree["state"] = {name: torch.cat([chunk.state[name] for chunk in chunks]) for name in chunks[0].state}
        if chunks[0].idle is not None:
            tree["idle"] = torch.cat([chunk.idle for chunk in chunks if chunk.idle is not None])
    if waiting is not None and len(waiting):
        tree["waiting"] = {"ids": waiting.ids, "counts": waiting.counts, "idle": waiting.idle}
    if tree:  # also where no table asks for it yet: one that does may be resumed with it
        tree["clock"] = torch.tensor([clock])
    return tree


def clock_of(tables: Mapping[str, Any]) -> int:
    """The number of the update that packed tables are as of, where any of them needs it."""
    return max((int(tree["clock"]) for tree in tables.values() if "clock" in tree), default=0)


def in_order(tree: Mapping[str, Any], spec: TableSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows of a packed table, by id."""
    if "ids" not in tree:
        return torch.empty(0, dtype=torch.int64), torch.empty((0, spec.dim), dtype=spec.torch_dtype)
    ids, order = torch.sort(tree["ids"])
    return ids, tree["rows"][order]


def unpack(tree: Mapping[str, Any]) -> Chunk | None:
    """The rows of a packed table, if it has any."""
    return Chunk(tree["ids"], tree["rows"], dict(tree["state"]), tree.get("idle")) if "ids" in tree else None


def unpack_waiting(tree: Mapping[str, Any]) -> WaitingChunkIds | None:
    return WaitingChunkIds(**tree["waiting"]) if "waiting" in tree else None


def _exchange(group: Group, ids: torch.Tensor, gradients: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    counts = torch.zeros(group.size, dtype=torch.int64)
    counts[group.rank] = len(ids)
    group.all_reduce(counts)
    sizes = counts.tolist()
    if not any(sizes):
        return []
    all_ids = [torch.empty(size, dtype=torch.int64) for size in sizes]
    all_rows = [torch.empty(size * gradients.shape[1], dtype=gradients.dtype) for size in sizes]
    group.all_gather(all_ids, ids.contiguous())
    group.all_gather(all_rows, gradients.contiguous().view(-1))
    return [(found, rows.view(-1, gradients.shape[1])) for found, rows in zip(all_ids, all_rows, strict=True)]
