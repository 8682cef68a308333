"""The tensors of a server: dense blocks, sparse tables, and pushes that wait for their commit.

The keeper decides what is done; here it is done, in this order for every range on every replica, so that all replicas
come to the same. A push that cannot be applied (a row's gradient that is not finite, a wrong shape, settings that its
table has nothing for) is refused before anything is changed. Dense gradients are known to be finite by who pushes them.
What goes wrong after that, as a rule for want of memory, is a `HalfMade`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import msgspec
import torch

from paceline.server.dense import Block, OptimizerSettings
from paceline.server.errors import HalfMade
from paceline.server.messages import ApplyLease, CommitStep, StageStep
from paceline.server.parcels import Detail, Making, Packing, Parcel, StagedPush, UpdateSettings
from paceline.server.tables import Tables


class TensorStore:
    make_block = Block

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.tables = Tables()
        self._sections: tuple[OptimizerSettings, ...] = ()
        self._staged: dict[tuple[int, int], dict[int, list[tuple[set[int], Parcel]]]] = {}

    # -- before anything -------------------------------------------------------------------------------------------

    def check(self, parcel: Parcel) -> None:
        """Raise a ValueError, or a MemoryError, for a push or a pull that cannot be done."""
        for rows in parcel.detail.rows:
            self.tables.check(rows, parcel)
        for where in parcel.detail.dense:
            if (block := self.blocks.get(where.number)) is not None:
                gradient, values = parcel.slice(where), block.values
                if (gradient.shape, gradient.dtype) != (values.shape, values.dtype):
                    raise ValueError(
                        f"range {where.number} has {values.numel()} elements of {values.dtype}, and is pushed "
                        f"{gradient.numel()} of {gradient.dtype}: the workers and this server cut the parameters "
                        "differently"
                    )

    # -- the keeper's side -----------------------------------------------------------------------------------------

    def load(self, ranges: Sequence[int], parcel: Parcel) -> None:
        detail = parcel.detail
        self._sections = detail.sections or self._sections
        wanted = set(ranges)
        for making in detail.makes:
            if making.values.number in wanted:
                self.blocks[making.values.number] = self._make(making, parcel)
        if detail.partitions is not None:
            self.tables.take_up(detail.tables, detail.partitions, wanted)
            self.tables.load(parcel, wanted)

    def _make(self, making: Making, parcel: Parcel) -> Block:
        block = self.make_block(parcel.slice(making.values).clone(), making.section, self._sections[making.section])
        block.load_state({name: parcel.slice(where).clone() for name, where in making.state.items()})
        return block

    def stage(self, ranges: Sequence[int], push: StageStep, parcel: Parcel) -> None:
        ranks = self._staged.setdefault((push.generation, push.step), {})
        ranks.setdefault(push.rank, []).append((set(ranges), parcel))

    def unstage(self, number: int, generation: int, step: int) -> None:
        ranks = self._staged.get((generation, step), {})
        for rank, pushes in list(ranks.items()):
            left = [(numbers - {number}, parcel) for numbers, parcel in pushes if numbers - {number}]
            if left:
                ranks[rank] = left
            else:
                del ranks[rank]
        if not ranks:
            self._staged.pop((generation, step), None)

    def commit(self, ranges: Sequence[int], commit: CommitStep) -> None:
        settings = commit.settings
        unused = self._unused(settings)
        key = (commit.generation, commit.step)
        parts = self._parts_for(key, ranges)
        self.tables.check_settings(parts, settings.tables, commit.step)
        for number, gradients in self._staged_for(key, ranges).items():
            with _in_full(f"range {number}"):
                block = self.blocks[number]
                gradient = _sum(gradients, commit.scale)
                block.update(gradient, settings.sections[block.section], unused.get(number, ()))
        with _in_full("the rows of tables"):
            self.tables.update(parts, commit.scale, settings.tables, commit.step)
        for number in ranges:
            self.unstage(number, commit.generation, commit.step)

    def _staged_for(self, key: tuple[int, int], ranges: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        """The dense gradients that wait, in the order of ranks, so that their sum has the same bits each time."""
        found: dict[int, list[torch.Tensor]] = {}
        for parcel, numbers in self._parts_for(key, ranges):
            for where in parcel.detail.dense:
                if where.number in numbers:
                    found.setdefault(where.number, []).append(parcel.slice(where))
        return found

    def _parts_for(self, key: tuple[int, int], ranges: Sequence[int]) -> list[tuple[Parcel, set[int]]]:
        wanted = set(ranges)
        pushes = sorted(self._staged.get(key, {}).items())
        return [(parcel, numbers & wanted) for _, parcels in pushes for numbers, parcel in parcels]

    def _unused(self, settings: UpdateSettings) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for where in settings.unused:
            found.setdefault(where.number, []).append((where.start, where.start + where.length))
        return found

    def apply(self, ranges: Sequence[int], push: ApplyLease, parcel: Parcel) -> None:
        settings = push.settings
        wanted, unused = set(ranges), self._unused(settings)
        outputs = {where.number: where for where in parcel.detail.wants}
        if self.tables.held:
            self.tables.check_settings([(parcel, wanted)], settings.tables, push.number)
        for where in parcel.detail.dense:
            if where.number in wanted:
                block = self.blocks[where.number]
                with _in_full(f"range {where.number}"):
                    gradient = parcel.slice(where)
                    if push.scale != 1.0:
                        gradient = gradient * push.scale
                    gradient, others = block.whole(gradient, where.offset)
                    block.update(gradient, settings.sections[block.section], [*unused.get(where.number, ()), *others])
                # While it is in the cache; who asked looks at it only when it has the answer.
                if where.number in outputs and outputs[where.number].length == block.values.numel():
                    parcel.wanted_slice(outputs[where.number]).copy_(block.values)
                    parcel.written.add(where.number)
        if self.tables.held:
            with _in_full("the rows of tables"):
                self.tables.update([(parcel, wanted)], push.scale, settings.tables, push.number)

    def pull(self, ranges: Sequence[int], parcel: Parcel) -> Parcel | None:
        wanted = set(ranges)
        for where in parcel.detail.wants:
            if where.number in wanted and where.number not in parcel.written:
                values = self.blocks[where.number].values
                if where.offset < 0 or where.offset + where.length > values.numel():
                    raise ValueError(
                        f"range {where.number} has {values.numel()} elements, not {where.offset} to "
                        f"{where.offset + where.length}: the workers and this server cut the parameters differently"
                    )
                parcel.wanted_slice(where).copy_(values[where.offset : where.offset + where.length])
        if self.tables.held & wanted:
            self.tables.pull(parcel, wanted)
        if (squares := parcel.detail.squares) is not None:
            self._write_squares((squares.generation, squares.step), ranges, parcel.wanted[0])
        if parcel.detail.refreshes:
            return self.tables.refresh(parcel, wanted)
        return self._export(ranges) if parcel.detail.exports else None

    def _write_squares(self, key: tuple[int, int], ranges: Sequence[int], out: torch.Tensor) -> None:
        dense = self._staged_for(key, ranges)
        found = [
            float(_sum(dense[number], 1.0).double().square().sum()) if number in dense else 0.0 for number in ranges
        ]
        if self.tables.held & set(ranges):
            found[-1] += self.tables.squares(self._parts_for(key, ranges))
        out.zero_()
        out[: len(found)] = torch.tensor(found, dtype=torch.float64)

    def _export(self, ranges: Sequence[int]) -> Parcel:
        packing = Packing()
        makes = tuple(self._pack_block(number, packing) for number in ranges if number in self.blocks)
        detail = self.tables.pack(set(ranges), Detail(makes=makes, sections=self._sections), packing)
        return Parcel(detail, packing.tensors)

    def _pack_block(self, number: int, packing: Packing) -> Making:
        block = self.blocks[number]
        state = {name: packing.slice(number, value.clone()) for name, value in block.state().items()}
        return Making(packing.slice(number, block.values.clone()), block.section, state)

    def snapshot(self, number: int) -> Parcel:
        packing = Packing()
        makes = (self._pack_block(number, packing),) if number in self.blocks else ()
        detail = self.tables.pack({number}, Detail(makes=makes, sections=self._sections), packing)
        staged = tuple(self._pack_staged(number, packing))
        return Parcel(msgspec.structs.replace(detail, staged=staged), packing.tensors)

    def _pack_staged(self, number: int, packing: Packing) -> Iterator[StagedPush]:
        for (generation, step), ranks in self._staged.items():
            for rank, pushes in ranks.items():
                for numbers, parcel in pushes:
                    if number not in numbers:
                        continue
                    dense = tuple(
                        packing.slice(number, parcel.slice(where).clone())
                        for where in parcel.detail.dense
                        if where.number == number
                    )
                    rows = tuple(self.tables.pack_staged(number, parcel, packing))
                    yield StagedPush(generation, step, rank, dense, rows)

    def restore(self, number: int, parcel: Parcel) -> None:
        self.load([number], parcel)
        for push in parcel.detail.staged:
            staged = Parcel(Detail(dense=push.dense, rows=push.rows), parcel.tensors)
            self.stage([number], StageStep(push.generation, push.step, push.rank), staged)

    def forget(self, number: int) -> None:
        self.blocks.pop(number, None)
        self.tables.forget(number)
        for generation, step in list(self._staged):
            self.unstage(number, generation, step)

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks.values()) + self.tables.num_bytes

    @property
    def num_keys(self) -> int:
        return self.tables.num_keys


@contextlib.contextmanager
def _in_full(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise HalfMade(f"the update of {what} could not be finished: {type(error).__name__}: {error}") from error


def _sum(gradients: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    total = gradients[0]
    if len(gradients) > 1:
        total = gradients[0] + gradients[1]
        for gradient in gradients[2:]:
            total += gradient
    return total if scale == 1.0 else total * scale
