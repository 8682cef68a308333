"""The sparse tables of a server. The rows of several ranges (partitions of the ids) lie in one table each, so that a
push or a pull needs one look into its index, however many ranges it concerns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import torch

from paceline.server.ages import Clocks
from paceline.server.chunk import Chunk, WaitingChunkIds
from paceline.server.merging import merged
from paceline.server.parcels import (
    Detail,
    Packing,
    Parcel,
    Partitions,
    TableChunk,
    TableRows,
    TableSettings,
    WaitingChunk,
)
from paceline.server.row_optimizers import Hyper
from paceline.server.rows import RowTable
from paceline.server.spec import TableSpec

_CHUNK_ROWS = 1 << 16
AnyChunk = TypeVar("AnyChunk", Chunk, WaitingChunkIds)


class Tables:
    def __init__(self) -> None:
        self.tables: dict[str, RowTable] = {}
        self.partitions: Partitions | None = None
        self._clocks = Clocks()
        self.held: set[int] = set()

    def take_up(self, specs: Sequence[TableSpec], partitions: Partitions, ranges: set[int]) -> None:
        """Hold the rows of these ranges from now on; there are none yet."""
        if self.partitions != partitions:
            self.partitions, self._clocks = partitions, Clocks(partitions)
        for spec in specs:
            present = self.tables[spec.name].spec if spec.name in self.tables else spec
            if present != spec:
                raise ValueError(f"table {spec.name!r} is {present} here, but {spec} is to be loaded")
        self.tables.update({spec.name: RowTable(spec, self._clocks) for spec in specs if spec.name not in self.tables})
        self.held |= {number for number in ranges if partitions.has(number)}

    def has(self, number: int) -> bool:
        return number in self.held

    # -- training ----------------------------------------------------------------------------------------------------

    def check(self, rows: TableRows, parcel: Parcel) -> None:
        """Where no rows are held, none of these will be applied: the worker is told that they are not here."""
        if self.held:
            self._table(rows.table).check(parcel.tensors[rows.ids], parcel.tensors[rows.rows])

    def update(
        self,
        parts: Sequence[tuple[Parcel, set[int]]],
        scale: float,
        settings: Sequence[TableSettings],
        step: int,
    ) -> None:
        """Apply what these parcels push to these ranges, as one update."""
        hyper = {one.table: one.values for one in settings}
        for name, (ids, gradients) in self._summed(parts):
            if scale != 1.0:
                gradients = gradients * scale
            self._table(name).push(ids, gradients, Hyper.of(hyper[name]), step)
        self._clocks.move_on({number for _, ranges in parts for number in ranges}, step)
        for table in self.tables.values():
            table.sweep()

    def check_settings(
        self, parts: Sequence[tuple[Parcel, set[int]]], settings: Sequence[TableSettings], step: int
    ) -> None:
        """Raise what an update of these would raise on account of its settings."""
        hyper = {one.table: one.values for one in settings}
        for name in {rows.table for parcel, ranges in parts if ranges & self.held for rows in parcel.detail.rows}:
            self._table(name).check_settings(Hyper.of(hyper[name]), step)

    def squares(self, parts: Sequence[tuple[Parcel, set[int]]]) -> float:
        """Of the sum of what these parcels push."""
        return sum(float(gradients.double().square().sum()) for _, (_, gradients) in self._summed(parts))

    def _summed(
        self, parts: Sequence[tuple[Parcel, set[int]]]
    ) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        pushed: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for parcel, ranges in parts:
            for rows in parcel.detail.rows:
                ids, gradients = self._select(parcel.tensors[rows.ids], parcel.tensors[rows.rows], ranges)
                if len(ids):
                    pushed.setdefault(rows.table, []).append((ids, gradients))
        for name, pairs in pushed.items():
            yield name, merged(pairs)

    def pull(self, parcel: Parcel, ranges: set[int]) -> None:
        """Some of these ranges are held here."""
        stamps = parcel.wanted[parcel.detail.stamps] if parcel.detail.stamps >= 0 else None
        for number, want in enumerate(parcel.detail.row_wants):
            ids, out = parcel.tensors[want.ids], parcel.wanted[want.rows]
            table = self._table(want.table)
            mask = self._mask(ids, ranges)
            if mask is None:
                table.pull(ids, make=parcel.detail.makes_rows, out=out)
            else:
                out[mask] = table.pull(ids[mask], make=parcel.detail.makes_rows)
            if stamps is not None:
                stamps[number] = table.version if mask is None else -1

    def refresh(self, parcel: Parcel, ranges: set[int]) -> Parcel:
        """The rows that have changed since somebody pulled them."""
        packing, found = Packing(), []
        for one in parcel.detail.refreshes if ranges & self.held else ():
            ids, table = parcel.tensors[one.ids], self._table(one.table)
            if self._mask(ids, ranges) is None:
                changed = table.changed_since(ids, one.since).nonzero().view(-1)
                found.append(
                    TableRows(one.table, packing.add(changed), packing.add(table.pull(ids[changed], make=False)))
                )
        return Parcel(Detail(rows=tuple(found)), packing.tensors)

    def _table(self, name: str) -> RowTable:
        try:
            return self.tables[name]
        except KeyError:
            known = ", ".join(map(repr, self.tables)) or "none"
            raise ValueError(f"there is no table {name!r} on this server, which has {known}") from None

    def _mask(self, ids: torch.Tensor, ranges: set[int]) -> torch.Tensor | None:
        """Which ids are in these ranges; None for all of them, as it is while nothing moves. A parcel may have ids of
        ranges that are not held here: they moved meanwhile, or another server backs them up."""
        partitions = self.partitions
        if partitions is None:  # dense ranges are all that is here, and what was pushed to them came with rows
            return torch.zeros(len(ids), dtype=torch.bool)
        mine = torch.zeros(partitions.count, dtype=torch.bool)
        mine[[number - partitions.first for number in ranges if partitions.has(number)]] = True
        if bool(mine.all()):
            return None
        mask = mine[partitions.of(ids) - partitions.first]
        return None if bool(mask.all()) else mask

    def _select(self, ids: torch.Tensor, values: torch.Tensor, ranges: set[int]) -> tuple[torch.Tensor, torch.Tensor]:
        mask = self._mask(ids, ranges)
        return (ids, values) if mask is None else (ids[mask], values[mask])

    # -- moving ------------------------------------------------------------------------------------------------------

    def load(self, parcel: Parcel, ranges: set[int]) -> None:
        self._clocks.start(ranges, parcel.detail.clock)
        for chunk in parcel.detail.chunks:
            self._table(chunk.table).load(self._part_of(unpack_chunk(chunk, parcel), ranges))
        for one in parcel.detail.waiting:
            self._table(one.table).load_waiting(self._part_of(unpack_waiting(one, parcel), ranges))

    def pack(self, ranges: set[int], detail: Detail, packing: Packing) -> Detail:
        """All rows of these ranges."""
        if not ranges & self.held:
            return detail
        chunks = tuple(
            pack_chunk(name, chunk, packing)
            for name, table in self.tables.items()
            for chunk in table.export(_CHUNK_ROWS, lambda ids: self._mask(ids, ranges))
        )
        waiting = tuple(
            pack_waiting(name, part, packing)
            for name, table in self.tables.items()
            if (whole := table.waiting()) is not None and len(part := self._part_of(whole, ranges))
        )
        return msgspec.structs.replace(
            detail,
            tables=tuple(table.spec for table in self.tables.values()),
            partitions=self.partitions,
            chunks=chunks,
            waiting=waiting,
            clock=self._clocks.at(ranges),
        )

    def _part_of(self, chunk: AnyChunk, ranges: set[int]) -> AnyChunk:
        mask = self._mask(chunk.ids, ranges)
        return chunk if mask is None else chunk.select(mask)

    def pack_staged(self, number: int, parcel: Parcel, packing: Packing) -> Iterator[TableRows]:
        if number not in self.held:
            return
        for rows in parcel.detail.rows:
            ids, values = self._select(parcel.tensors[rows.ids], parcel.tensors[rows.rows], {number})
            if len(ids):
                yield TableRows(rows.table, packing.add(ids.clone()), packing.add(values.clone()))

    def forget(self, number: int) -> None:
        if number in self.held:
            self.held.discard(number)
            for table in self.tables.values():
                for ids in table.all_ids():
                    table.drop(ids[self._is_in(ids, number)])

    def _is_in(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        assert self.partitions is not None
        return self.partitions.of(ids) == number

    @property
    def num_keys(self) -> int:
        return sum(len(table) for table in self.tables.values())

    @property
    def num_bytes(self) -> int:
        return sum(table.num_bytes for table in self.tables.values())


def pack_chunk(table: str, chunk: Chunk, packing: Packing) -> TableChunk:
    tensors = {"rows": packing.add(chunk.rows), **{name: packing.add(value) for name, value in chunk.state.items()}}
    return TableChunk(table, packing.add(chunk.ids), tensors, packing.add(chunk.idle) if chunk.idle is not None else -1)


def unpack_chunk(packed: TableChunk, parcel: Parcel) -> Chunk:
    state = {name: parcel.tensors[number] for name, number in packed.tensors.items()}
    rows = state.pop("rows")
    idle = parcel.tensors[packed.idle] if packed.idle >= 0 else None
    return Chunk(parcel.tensors[packed.ids], rows, state, idle)


def pack_waiting(table: str, waiting: WaitingChunkIds, packing: Packing) -> WaitingChunk:
    return WaitingChunk(table, packing.add(waiting.ids), packing.add(waiting.counts), packing.add(waiting.idle))


def unpack_waiting(packed: WaitingChunk, parcel: Parcel) -> WaitingChunkIds:
    return WaitingChunkIds(parcel.tensors[packed.ids], parcel.tensors[packed.counts], parcel.tensors[packed.idle])
