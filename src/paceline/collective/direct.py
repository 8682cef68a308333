"""All-reduce in the memory of one host, on the calling thread.

Small tensors take one round: all write, all read all and compute the same result in the same order. Tensors in the
arena are reduced where they lie: each member takes one slice, combines it over all members and writes it back to all,
in pieces that stay in its cache. Other tensors go through the slots in pieces: memory that is used again and again,
so that it too stays in the cache, and the tensor itself crosses the memory bus once in and once out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective.base import Operation, bounds, spans
from paceline.collective.neighbourhood import NUM_SLOTS, Neighbourhood, nothing
from paceline.collective.reductions import Reduction
from paceline.wire.memory import Arena

ONE_ROUND_BYTES = 64 * 1024
# All members' pieces together: enough to make the calls few, little enough to stay in the cache between them.
PIECES_BYTES = 2 << 20
_MAX_CACHED_VIEWS = 64


class Direct:
    def __init__(self, local: Neighbourhood, arena: Arena) -> None:
        self._local = local
        self._arena = arena
        self._cut_slots: dict[tuple[torch.dtype, int], list[list[torch.Tensor]]] = {}
        self._large: dict[tuple[object, ...], list[tuple[torch.Tensor, ...]]] = {}

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce a flat tensor in place."""
        if tensor.nbytes <= ONE_ROUND_BYTES:
            self._in_one_round(operation, tensor, reduction)
            return
        locations = self._local.open(operation, self._arena.offset_of(tensor))
        if min(locations) >= 0:
            self._in_place(operation, tensor, reduction, locations)
        elif len(locations) == 2:
            self._by_pair(operation, tensor, reduction)
        else:
            self._by_parts(operation, tensor, reduction)

    def _in_one_round(self, operation: Operation, tensor: torch.Tensor, reduction: Reduction) -> None:
        local = self._local
        slot = local.next_slot()
        views = self._slots(tensor.dtype, tensor.numel())[slot]
        local.write_header(operation, slot)
        views[local.index].copy_(tensor)
        local.one_round(operation, slot)
        first, second, *others = views
        reduction.combine(first, second, tensor)
        for other in others:
            reduction.combine(tensor, other, tensor)
        if reduction.divides:
            tensor.div_(len(views))

    def _slots(self, dtype: torch.dtype, num_elements: int) -> list[list[torch.Tensor]]:
        """The first elements of each slot. Kept, because making views takes as long as a small reduction."""
        key = (dtype, num_elements)
        found = self._cut_slots.get(key)
        if found is None:
            if len(self._cut_slots) >= _MAX_CACHED_VIEWS:
                self._cut_slots.clear()
            slots = self._local.slots(dtype)
            found = [[view[:num_elements] for view in slots[slot]] for slot in range(NUM_SLOTS)]
            self._cut_slots[key] = found
        return found

    def _in_place(
        self, operation: Operation, tensor: torch.Tensor, reduction: Reduction, locations: Sequence[int]
    ) -> None:
        for own, *others in self._pieces(tensor, locations, reverse=operation.number % 2 == 1):
            for other in others:
                reduction.combine(own, other, own)
            if reduction.divides:
                own.div_(len(locations))
            for other in others:
                other.copy_(own)
        self._local.rounds(operation, 1, nothing, nothing)

    def _pieces(
        self, tensor: torch.Tensor, locations: Sequence[int], *, reverse: bool
    ) -> list[tuple[torch.Tensor, ...]]:
        """This member's slice in pieces: for each, its own and all others' view. Every other time from the end, to
        begin with what the last operation left in the cache.

        Kept, because making views takes longer than a small reduction. They are views of the mapped memory, not of
        the tensor: they hold nothing alive and stay right when another tensor of the size lies there."""
        key = (tensor.dtype, tensor.numel(), *locations)
        found = self._large.get(key)
        if found is None:
            if len(self._large) >= _MAX_CACHED_VIEWS:
                self._large.clear()
            found = self._large[key] = self._cut(tensor.dtype, tensor.numel(), locations)
        return found[::-1] if reverse else found

    def _cut(self, dtype: torch.dtype, num: int, locations: Sequence[int]) -> list[tuple[torch.Tensor, ...]]:
        local = self._local
        low, high = bounds(num, len(locations))[local.index]
        others = [index for index in range(len(locations)) if index != local.index]
        memories = [(local.memories[local.ranks[k]], locations[k]) for k in (local.index, *others)]
        step = max(1, PIECES_BYTES // len(locations) // dtype.itemsize)
        return [
            tuple(memory.tensor(at + first * dtype.itemsize, last - first, dtype) for memory, at in memories)
            for first, last in spans(low, high, step)
        ]

    def _by_pair(self, operation: Operation, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Two members: each copies its piece in, and adds the other's to its own. One signal for each piece."""
        local, mine, dtype = self._local, self._local.index, tensor.dtype
        pieces = torch.split(tensor, local.chunk_elements(tensor.numel(), dtype))
        slots, last_slots = self._slots(dtype, pieces[0].numel()), self._slots(dtype, pieces[-1].numel())
        last = len(pieces) - 1

        def write(k: int, slot: int) -> None:
            (slots if k < last else last_slots)[slot][mine].copy_(pieces[k])

        def read(k: int, slot: int) -> None:
            own, other = pieces[k], (slots if k < last else last_slots)[slot][1 - mine]
            reduction.combine(*((own, other) if mine == 0 else (other, own)), own)
            if reduction.divides:
                own.div_(2)

        local.rounds(operation, len(pieces), write, read)

    def _by_parts(self, operation: Operation, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Many members: each reduces its part of a piece in its own slot, where the others fetch it in the next
        round."""
        local = self._local
        slots, mine, num = local.slots(tensor.dtype), local.index, len(local.ranks)
        chunks = spans(0, tensor.numel(), local.chunk_elements(tensor.numel(), tensor.dtype))

        def write(k: int, slot: int) -> None:
            if k == len(chunks):
                return  # the last round only delivers results
            low, high = chunks[k]
            first, last = bounds(high - low, num)[mine]
            slots[slot][mine][:first].copy_(tensor[low : low + first])
            slots[slot][mine][last : high - low].copy_(tensor[low + last : high])

        def read(k: int, slot: int) -> None:
            if k > 0:
                fetch(k - 1, (slot - 1) % NUM_SLOTS)
            if k < len(chunks):
                combine(k, slot)

        def combine(k: int, slot: int) -> None:
            low, high = chunks[k]
            first, last = bounds(high - low, num)[mine]
            own = tensor[low + first : low + last]
            result = slots[slot][mine][first:last]
            parts = [own if index == mine else slots[slot][index][first:last] for index in range(num)]
            reduction.combine(parts[0], parts[1], result)
            for part in parts[2:]:
                reduction.combine(result, part, result)
            if reduction.divides:
                result.div_(num)
            own.copy_(result)

        def fetch(k: int, slot: int) -> None:
            low, high = chunks[k]
            for index, (first, last) in enumerate(bounds(high - low, num)):
                if index != mine:
                    tensor[low + first : low + last].copy_(slots[slot][index][first:last])

        local.rounds(operation, len(chunks) + 1, write, read, ahead=False)
