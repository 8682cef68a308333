"""Tables that every worker holds: each gets what all others have pushed, and makes the same update.

The gradients of all ranks are added up by id in the order of ranks, so all workers come to the same bits. This is
all-reduce for tables: simple, and as large as the memory of the smallest worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.collective import Group
from paceline.server.chunk import Chunk
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
        self._tables = {spec.name: RowTable(spec) for spec in sparse.specs}
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
        if self._decided is None:
            return
        step, factor = self._decided
        self._decided = None
        settings = {one.table: one.values for one in self._sparse.settings()}
        for name, (ids, gradients) in self._gathered.items():
            scaled = gradients if factor == 1.0 else gradients * factor
            self._tables[name].push(ids, scaled.contiguous(), Hyper.of(settings[name]), step)
        self._gathered = {}

    # -- state -------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {name: pack(list(table.export(_CHUNK_ROWS))) for name, table in self._tables.items()}

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return in_order(pack(list(self._tables[name].export(_CHUNK_ROWS))), self._tables[name].spec)

    def load(self, tables: Mapping[str, Any]) -> None:
        for spec in self._sparse.specs:
            table = RowTable(spec)
            if tables.get(spec.name):
                table.load(unpack(tables[spec.name]))
            self._tables[spec.name] = table


def pack(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Rows as a tree of tensors; empty if there are none."""
    if not chunks:
        return {}
    return {
        "ids": torch.cat([chunk.ids for chunk in chunks]),
        "rows": torch.cat([chunk.rows for chunk in chunks]),
        "versions": torch.cat([chunk.versions for chunk in chunks]),
        "state": {name: torch.cat([chunk.state[name] for chunk in chunks]) for name in chunks[0].state},
    }


def in_order(tree: Mapping[str, Any], spec: TableSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and rows of a packed table, by id."""
    if not tree:
        return torch.empty(0, dtype=torch.int64), torch.empty((0, spec.dim), dtype=spec.torch_dtype)
    ids, order = torch.sort(tree["ids"])
    return ids, tree["rows"][order]


def unpack(tree: Mapping[str, Any]) -> Chunk:
    """The inverse, for one that is not empty."""
    return Chunk(tree["ids"], tree["rows"], dict(tree["state"]), tree["versions"])


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
