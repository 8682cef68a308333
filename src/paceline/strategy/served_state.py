"""The state that is on servers, from a worker's side: loaded when a run begins, restored after a loss, gathered for
checkpoints.

A checkpoint has what one of all-reduce has: the parameters, the optimizers' states as torch keeps them, parameter by
parameter, and each table as ids and rows. So a run can go on with another number of servers, with another strategy, or
alone.

Invariant: all that a checkpoint has of a range (values, optimizer state, rows, the record of what was applied) is of
one answer of its server, made under one lock. Ranges may be of different moments; each says of which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.control.leases.lease_set import LeaseSet
from paceline.server import tables
from paceline.server.chunk import Chunk, WaitingChunkIds, joined_waiting
from paceline.server.client import GroupClient
from paceline.server.dense import COUNTS, joined, settings_of
from paceline.server.errand import Errand
from paceline.server.layout import DenseSpan, ParameterPart, RangeLayout
from paceline.server.messages import CommitStep, Need, ServerRequest, Spans
from paceline.server.parcels import Detail, Making, Packing, Parcel, Slice, TableChunk, WaitingChunk
from paceline.strategy.replicated import clock_of, pack, unpack, unpack_waiting
from paceline.strategy.sparse import Sparse


class _Given(NamedTuple):
    """What one answer has of the ranges that it gave."""

    answer: Parcel
    ranges: tuple[int, ...]


class ServedState:
    """`tables` are those that a worker has read from a checkpoint, and that it loads; `leases` what had been applied to
    each range, `counts` what optimizers count for a range, where that is not the same for a whole parameter; `now` the
    number of the newest update that it knows of."""

    def __init__(self, layout: RangeLayout, sparse: Sparse, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._layout = layout
        self._sparse = sparse
        self._optimizers = optimizers
        self.tables: dict[str, Any] = {}
        self.gathered_step = 0  # the newest that a range had when all was gathered last
        self.forgone: dict[int, Spans] = {}  # what ranges had lost then
        self.leases: dict[int, LeaseSet] = {}
        self.counts: dict[int, dict[str, torch.Tensor]] = {}
        self.now = 0

    def begun(self) -> LeaseSet:
        """The leases that had been applied to all ranges."""
        sets = [self.leases.get(number, LeaseSet()) for number in range(self._layout.num_ranges)]
        found = sets[0]
        for other in sets[1:]:
            found = found.meet(other)
        return found

    # -- to the servers ----------------------------------------------------------------------------------------------

    def pack_load(self, request: ServerRequest) -> Parcel:
        """The state of these ranges as this worker has it."""
        packing = Packing()
        makes = tuple(
            self._make(number, self._layout.spans[number], packing)
            for number in request.ranges
            if number < len(self._layout.spans)
        )
        detail = Detail(
            makes=makes,
            sections=tuple(
                settings_of(self._optimizers[one.optimizer], self._optimizers[one.optimizer].param_groups[one.group])
                for one in self._layout.sections
            ),
            tables=self._sparse.specs,
            partitions=self._layout.partitions,
            chunks=tuple(self._chunks(request.ranges, packing)),
            waiting=tuple(self._waiting(request.ranges, packing)),
            clock=max(self.now, clock_of(self.tables)),
        )
        return Parcel(detail, packing.tensors)

    def _make(self, number: int, span: DenseSpan, packing: Packing) -> Making:
        section = self._layout.sections[span.section]
        optimizer = self._optimizers[section.optimizer]
        values = _cut([part.parameter.detach() for part in section.parts], section.parts, span)
        states = [optimizer.state.get(part.parameter, {}) for part in section.parts]
        kept = {}
        for name in dict.fromkeys(name for state in states for name in state):
            value = self._cut_state(name, states, section.parts, span)
            if value is not None:
                kept[name] = packing.slice(number, self.counts.get(number, {}).get(name, value))
        return Making(packing.slice(number, values), span.section, kept)

    def _cut_state(
        self, name: str, states: Sequence[Mapping[str, Any]], parts: Sequence[ParameterPart], span: DenseSpan
    ) -> torch.Tensor | None:
        inside = [(part, state) for part, state in zip(parts, states, strict=True) if _overlaps(part, span)]
        values = [state.get(name) if isinstance(state.get(name), torch.Tensor) else None for _, state in inside]
        if not any(value is not None for value in values):
            return None
        whole = joined(name, values, [part.parameter.numel() for part, _ in inside])
        if len(whole) == 1:
            return whole
        first = inside[0][0].start
        return whole[span.start - first : span.stop - first].clone()

    def _chunks(self, ranges: Sequence[int], packing: Packing) -> list[TableChunk]:
        found = []
        for name, tree in self.tables.items():
            if (chunk := unpack(tree)) is not None and len(part := chunk.select(self._lie_in(ranges, chunk.ids))):
                found.append(tables.pack_chunk(name, part, packing))
        return found

    def _waiting(self, ranges: Sequence[int], packing: Packing) -> list[WaitingChunk]:
        found = []
        for name, tree in self.tables.items():
            kept = unpack_waiting(tree)
            if kept is not None and len(part := kept.select(self._lie_in(ranges, kept.ids))):
                found.append(tables.pack_waiting(name, part, packing))
        return found

    def _lie_in(self, ranges: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Which rows these ranges have."""
        partitions = self._layout.partitions
        if partitions is None:
            return torch.zeros(len(ids), dtype=torch.bool)
        return torch.isin(partitions.of(ids), torch.tensor(ranges, dtype=torch.int64))

    def describe_loss(self, numbers: set[int], step: int) -> str:
        """What is lost with these ranges that no worker has: rows, and what optimizers keep; empty if it is nothing."""
        spans = self._layout.spans
        kept = [spans[number] for number in numbers if number < len(spans) and self._is_kept_for(spans[number])]
        num_rows = sum(number >= len(spans) for number in numbers)
        parts = []
        if kept:
            size = sum(span.stop - span.start for span in kept)
            parts.append(f"what optimizers kept for {size:,} parameters (their values are as of step {step})")
        if num_rows and self._layout.partitions is not None:
            parts.append(f"{num_rows} of {self._layout.partitions.count} parts of the tables' rows")
        if not parts:
            return ""
        source = "the last checkpoint that this worker has read" if self.tables else "their beginning"
        return f"a server was lost, and no other had its ranges: {' and '.join(parts)} go back to {source}"

    def _is_kept_for(self, span: DenseSpan) -> bool:
        """Whether the optimizer of these parameters keeps anything from one step to the next."""
        section = self._layout.sections[span.section]
        optimizer = self._optimizers[section.optimizer]
        return type(optimizer) is not torch.optim.SGD or bool(optimizer.param_groups[section.group]["momentum"])

    # -- from the servers --------------------------------------------------------------------------------------------

    def gather(
        self, client: GroupClient, step: int, *, orphaned: bool = False, commit: CommitStep | None = None
    ) -> dict[str, Any]:
        """Everything, as of a step, in torch's form. Of leases each range is as of some moment, and says which it has.
        Who is `orphaned` also has the `commit` made that it was about to make."""
        parcels: list[Parcel] = []

        def ask(_: ServerRequest) -> Parcel:
            parcels.append(Parcel(Detail(exports=True)))
            return parcels[-1]

        everything = range(self._layout.num_ranges)
        errand = Errand(everything, commit=commit, pull=Need(step=step), exports=True, orphaned=orphaned)
        client.run(errand, ask, "gathering the state of the servers")
        self.gathered_step = max((record.step for record in errand.records.values()), default=0)
        self.forgone = errand.forgone
        # An answer may also have what does not count: of ranges that moved before it was given.
        given = [_Given(parcel.answer, parcel.given) for parcel in parcels if parcel.answer is not None]
        found: dict[int, tuple[Making, Parcel]] = {
            making.values.number: (making, one.answer)
            for one in given
            for making in one.answer.detail.makes
            if making.values.number in one.ranges
        }
        leases = {
            str(number): [record.epoch, record.prefix, list(record.beyond)]
            for number, record in sorted(errand.records.items())
        }
        return {
            "values": self._values(found),
            "optimizers": self._optimizer_states(found),
            "counts": self._counts(found),
            "tables": self._gathered_tables(given),
            "leases": leases,
        }

    def _values(self, found: Mapping[int, tuple[Making, Parcel]]) -> dict[int, torch.Tensor]:
        """Of parameters, by their `id`."""
        values = {}
        for section in self._layout.sections:
            for part in section.parts:
                flat = torch.empty(part.parameter.numel(), dtype=section.dtype)
                self._fill(flat, part, found, lambda making: making.values)
                values[id(part.parameter)] = flat.view(part.parameter.shape)
        return values

    def _optimizer_states(self, found: Mapping[int, tuple[Making, Parcel]]) -> list[dict[int, dict[str, torch.Tensor]]]:
        states: list[dict[int, dict[str, torch.Tensor]]] = []
        for optimizer in self._optimizers:
            numbers = {
                id(parameter): number
                for number, parameter in enumerate(
                    parameter for group in optimizer.param_groups for parameter in group["params"]
                )
            }
            states.append({})
            for section in self._layout.sections:
                for part in section.parts:
                    if id(part.parameter) in numbers and self._optimizers[section.optimizer] is optimizer:
                        state = self._state_of(part, found)
                        if state:
                            states[-1][numbers[id(part.parameter)]] = state
        return states

    def _state_of(self, part: ParameterPart, found: Mapping[int, tuple[Making, Parcel]]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for number, start, _ in self._layout.spans_of(part.name):
            making, answer = found[number]
            for name, place in making.state.items():
                value = answer.slice(place)
                if name in COUNTS:
                    state[name] = value[start if len(value) > 1 else 0].clone()
                elif name not in state:
                    flat = torch.zeros(part.parameter.numel(), dtype=value.dtype)
                    self._fill(flat, part, found, functools.partial(_kept, name))
                    state[name] = flat.view(part.parameter.shape)
        return state

    def _fill(
        self,
        flat: torch.Tensor,
        part: ParameterPart,
        found: Mapping[int, tuple[Making, Parcel]],
        choose: Callable[[Making], Slice | None],
    ) -> None:
        """Put together what ranges have of a parameter."""
        at = 0
        for number, start, length in self._layout.spans_of(part.name):
            making, answer = found[number]
            if (place := choose(making)) is not None:
                flat[at : at + length] = answer.slice(place)[start : start + length]
            at += length

    def _counts(self, found: Mapping[int, tuple[Making, Parcel]]) -> dict[str, dict[str, torch.Tensor]]:
        """What optimizers count once for a parameter, of the sections whose ranges have come differently far."""
        kept: dict[str, dict[str, torch.Tensor]] = {}
        for section in range(len(self._layout.sections)):
            numbers = [number for number, span in enumerate(self._layout.spans) if span.section == section]
            for name in COUNTS:
                held = {
                    number: answer.slice(making.state[name]).clone()
                    for number in numbers
                    for making, answer in [found[number]]
                    if name in making.state
                }
                if len({tuple(torch.unique(value).tolist()) for value in held.values()}) > 1:
                    for number, value in held.items():
                        kept.setdefault(str(number), {})[name] = value
        return kept

    def _gathered_tables(self, given: Sequence[_Given]) -> dict[str, Any]:
        chunks: dict[str, list[Chunk]] = {spec.name: [] for spec in self._sparse.specs}
        waiting: dict[str, list[WaitingChunkIds]] = {}
        for answer, ranges in given:
            for one in answer.detail.chunks:
                chunk = tables.unpack_chunk(one, answer)
                is_given = self._lie_in(ranges, chunk.ids)  # as a rule all are, and need no copy
                chunks[one.table].append(chunk if is_given.all() else chunk.select(is_given))
            for packed in answer.detail.waiting:
                kept = tables.unpack_waiting(packed, answer)
                waiting.setdefault(packed.table, []).append(kept.select(self._lie_in(ranges, kept.ids)))
        clock = max((answer.detail.clock for answer, _ in given), default=0)
        return {name: pack(found, joined_waiting(waiting.get(name, [])), clock) for name, found in chunks.items()}


def _kept(name: str, making: Making) -> Slice | None:
    return making.state.get(name)


def _overlaps(part: ParameterPart, span: DenseSpan) -> bool:
    return part.start < span.stop and part.stop > span.start


def _cut(tensors: Sequence[torch.Tensor], parts: Sequence[ParameterPart], span: DenseSpan) -> torch.Tensor:
    """What of these tensors, one for each part of a section, is in a span."""
    pieces = [
        tensor.reshape(-1)[max(span.start - part.start, 0) : span.stop - part.start]
        for tensor, part in zip(tensors, parts, strict=True)
        if _overlaps(part, span)
    ]
    return pieces[0].clone() if len(pieces) == 1 else torch.cat(pieces)
