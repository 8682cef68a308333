"""One pull of rows: which ids are asked of which server, and where what comes back belongs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.server.messages import ServerRequest
from paceline.server.parcels import Detail, Packing, Parcel, Partitions, TableRows
from paceline.server.scratch import Scratch
from paceline.server.spec import TableSpec


class RowsAsked(NamedTuple):
    """What one server was asked for, of one table: the positions of its ids (None: all are), and where rows land."""

    table: str
    at: torch.Tensor | None
    ids: torch.Tensor
    out: torch.Tensor


class PulledPart(NamedTuple):
    """What one server was asked for: those ranges, by that placement. `stamps` are the versions that its tables had
    then, where they were asked for; -1 of what it did not give."""

    version: int
    ranges: frozenset[int]
    asked: tuple[RowsAsked, ...]
    stamps: torch.Tensor | None


class RowPull:
    """`pack` is for an errand to all ranges that hold rows; `found` when it is done. What comes lands in `scratch`, and
    stays there until that is reset. If `stamped`, each part says what it is as of."""

    def __init__(
        self,
        wanted: Mapping[str, torch.Tensor],
        specs: Mapping[str, TableSpec],
        partitions: Partitions,
        scratch: Scratch,
        *,
        make: bool,
        stamped: bool = False,
    ) -> None:
        self._wanted = wanted
        self._specs = specs
        self._partitions = partitions
        self._scratch = scratch
        self._make = make
        self._stamped = stamped
        self._homes = {name: partitions.of(ids) for name, ids in wanted.items()}
        self.parts: list[PulledPart] = []

    def pack(self, request: ServerRequest) -> Parcel:
        packing, outputs, wants, asked = Packing(), Packing(), [], []
        for name, ids in self._wanted.items():
            mine = mask_of(self._partitions, self._homes[name], request.ranges)
            at = None if mine is None else mine.nonzero().view(-1)
            part = self._scratch.put(ids if at is None else ids[at])
            if len(part):
                spec = self._specs[name]
                out = self._scratch.empty((len(part), spec.dim), spec.torch_dtype)
                wants.append(TableRows(name, packing.add(part), outputs.add(out)))
                asked.append(RowsAsked(name, at, part, out))
        stamps = None
        if self._stamped and wants:
            stamps = self._scratch.empty((len(wants),), torch.int64).fill_(-1)
        detail = Detail(
            row_wants=tuple(wants),
            makes_rows=self._make,
            stamps=outputs.add(stamps) if stamps is not None else -1,
        )
        self.parts.append(PulledPart(request.version, frozenset(request.ranges), tuple(asked), stamps))
        return Parcel(detail, packing.tensors, outputs.tensors)

    def found(self) -> dict[str, torch.Tensor]:
        """The rows, as new tensors. What was asked for again has what was said last."""
        found = {
            name: torch.empty((len(ids), self._specs[name].dim), dtype=self._specs[name].torch_dtype)
            for name, ids in self._wanted.items()
        }
        for part in self.parts:
            for name, at, _, out in part.asked:
                if at is None:
                    found[name].copy_(out)
                else:
                    found[name].index_copy_(0, at, out)
        return found


def mask_of(partitions: Partitions, homes: torch.Tensor, ranges: Sequence[int]) -> torch.Tensor | None:
    """Which of the ids with these homes are in these ranges; None for all."""
    mine = torch.zeros(partitions.count, dtype=torch.bool)
    mine[[number - partitions.first for number in ranges if partitions.has(number)]] = True
    return None if bool(mine.all()) else mine[homes - partitions.first]
