"""The tensors of a server: dense blocks, sparse tables, and pushes that wait for their commit.

The keeper decides what is done; here it is done, in this order for every range on every replica, so that all replicas
come to the same. A push that cannot be applied (a gradient that is not finite, a wrong shape, no memory for its rows)
is refused by `check`, before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import torch

from paceline.server.dense import Block, Settings
from paceline.server.messages import Apply, Commit, Stage
from paceline.server.parcels import Detail, Making, Packing, Parcel, StagedPush, UpdateSettings
from paceline.server.tables import Tables


class TensorStore:
    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.tables = Tables()
        self._sections: tuple[Settings, ...] = ()
        self._staged: dict[tuple[int, int], dict[int, list[tuple[set[int], Parcel]]]] = {}
        self._settings: tuple[bytes, UpdateSettings] = (b"", UpdateSettings())

    # -- before anything -------------------------------------------------------------------------------------------

    def check(self, parcel: Parcel) -> None:
        """Raise a ValueError, or a MemoryError, for a push or a pull that cannot be done."""
        for rows in parcel.detail.rows:
            self.tables.check(rows, parcel)

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
        block = Block(parcel.slice(making.values).clone(), making.section, self._sections[making.section])
        block.load_state({name: parcel.slice(where).clone() for name, where in making.state.items()})
        return block

    def stage(self, ranges: Sequence[int], push: Stage, parcel: Parcel) -> None:
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

    def commit(self, ranges: Sequence[int], commit: Commit) -> None:
        settings = self._read(commit.settings)
        pushes = self._staged[(commit.generation, commit.step)]
        found: dict[int, list[torch.Tensor]] = {}
        wanted = set(ranges)
        for _, parcels in sorted(pushes.items()):  # in the order of ranks: the sum has the same bits each time
            for numbers, parcel in parcels:
                for where in parcel.detail.dense:
                    if where.number in numbers and where.number in wanted:
                        found.setdefault(where.number, []).append(parcel.slice(where))
        for number, gradients in found.items():
            block = self.blocks[number]
            block.update(_sum(gradients, commit.scale), settings.sections[block.section])
        parts = [(parcel, numbers & wanted) for _, parcels in sorted(pushes.items()) for numbers, parcel in parcels]
        self.tables.update(parts, commit.scale, settings.tables, commit.step)
        for number in ranges:
            self.unstage(number, commit.generation, commit.step)

    def apply(self, ranges: Sequence[int], push: Apply, parcel: Parcel) -> None:
        settings = self._read(push.settings)
        wanted = set(ranges)
        outputs = {where.number: where for where in parcel.detail.wants}
        for where in parcel.detail.dense:
            if where.number in wanted:
                block = self.blocks[where.number]
                gradient = parcel.slice(where)
                if push.scale != 1.0:
                    gradient = gradient * push.scale
                block.update(gradient, settings.sections[block.section])
                # While it is in the cache; who asked looks at it only when it has the answer.
                if where.number in outputs:
                    parcel.wanted_slice(outputs[where.number]).copy_(block.values)
                    parcel.written.add(where.number)
        self.tables.update([(parcel, wanted)], push.scale, settings.tables, push.number)

    def pull(self, ranges: Sequence[int], parcel: Parcel) -> None:
        wanted = set(ranges)
        for where in parcel.detail.wants:
            if where.number in wanted and where.number not in parcel.written:
                values = self.blocks[where.number].values
                if where.length != values.numel():
                    raise ValueError(
                        f"range {where.number} has {values.numel()} elements, not {where.length}: "
                        "the workers and this server cut the parameters differently"
                    )
                parcel.wanted_slice(where).copy_(values)
        self.tables.pull(parcel, wanted)

    def snapshot(self, number: int) -> Parcel:
        packing = Packing()
        detail = Detail(sections=self._sections)
        if (block := self.blocks.get(number)) is not None:
            state = {name: packing.slice(number, value.clone()) for name, value in block.state().items()}
            making = Making(packing.slice(number, block.values.clone()), block.section, state)
            detail = msgspec.structs.replace(detail, makes=(making,))
        if self.tables.has(number):
            detail = self.tables.pack(number, detail, packing)
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
            self.stage([number], Stage(push.generation, push.step, push.rank), staged)

    def forget(self, number: int) -> None:
        self.blocks.pop(number, None)
        self.tables.forget(number)
        for generation, step in list(self._staged):
            self.unstage(number, generation, step)

    # -- the rest ----------------------------------------------------------------------------------------------------

    def _read(self, raw: msgspec.Raw) -> UpdateSettings:
        """Settings seldom change from one push to the next."""
        data = bytes(raw)
        if data != self._settings[0]:
            self._settings = (data, msgspec.msgpack.decode(data, type=UpdateSettings))
        return self._settings[1]

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks.values()) + self.tables.num_bytes

    @property
    def num_keys(self) -> int:
        return self.tables.num_keys


def _sum(gradients: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    total = gradients[0]
    if len(gradients) > 1:
        total = gradients[0] + gradients[1]
        for gradient in gradients[2:]:
            total += gradient
    return total if scale == 1.0 else total * scale
