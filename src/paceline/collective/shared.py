"""The moves of `base.Path` through the memory of one host, where every rank of the group is a neighbour.

Each is a sequence of rounds: what a member puts into its slot in round k, and what it takes from the others' slots.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from paceline.collective.base import Operation, Sink, spans
from paceline.collective.neighbourhood import COUNTS_AT, STRIDE_BYTES, Neighbourhood
from paceline.collective.reductions import Reduction


class SharedPath:
    def __init__(self, local: Neighbourhood) -> None:
        self._local = local

    def barrier(self, operation: Operation) -> None:
        self._local.open(operation)

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> None:
        self._local.open(operation)
        slots, mine, source = (
            self._local.slots(tensor.dtype),
            self._local.index,
            self._local.ranks.index(root),
        )
        chunks = spans(0, tensor.numel(), self._local.chunk_elements(tensor.numel(), tensor.dtype))

        def write(k: int, slot: int) -> None:
            if mine == source:
                low, high = chunks[k]
                slots[slot][mine][: high - low].copy_(tensor[low:high])

        def read(k: int, slot: int) -> None:
            if mine != source:
                low, high = chunks[k]
                tensor[low:high].copy_(slots[slot][source][: high - low])

        self._local.rounds(operation, len(chunks), write, read)

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        self._local.open(operation)
        slots, mine, target = (
            self._local.slots(tensor.dtype),
            self._local.index,
            self._local.ranks.index(root),
        )
        chunks = spans(0, tensor.numel(), self._local.chunk_elements(tensor.numel(), tensor.dtype))

        def write(k: int, slot: int) -> None:
            if mine != target:
                low, high = chunks[k]
                slots[slot][mine][: high - low].copy_(tensor[low:high])

        def read(k: int, slot: int) -> None:
            if mine == target:
                low, high = chunks[k]
                result = tensor[low:high]
                for index in range(len(self._local.ranks)):
                    if index != target:
                        reduction.combine(result, slots[slot][index][: high - low], result)
                if reduction.divides:
                    result.div_(len(self._local.ranks))

        self._local.rounds(operation, len(chunks), write, read)

    def all_gather(self, operation: Operation, outputs: Sequence[torch.Tensor]) -> None:
        self._local.open(operation)
        slots, mine = self._local.slots(outputs[0].dtype), self._local.index
        largest = max(output.numel() for output in outputs)
        step = self._local.chunk_elements(largest, outputs[0].dtype)
        count = -(-largest // step)

        def write(k: int, slot: int) -> None:
            piece = outputs[mine][k * step : (k + 1) * step]
            slots[slot][mine][: piece.numel()].copy_(piece)

        def read(k: int, slot: int) -> None:
            for index, output in enumerate(outputs):
                if index != mine:
                    piece = output[k * step : (k + 1) * step]
                    piece.copy_(slots[slot][index][: piece.numel()])

        self._local.rounds(operation, count, write, read)

    def exchange(
        self, operation: Operation, sends: Sequence[torch.Tensor], receives: Sequence[int], sink: Sink
    ) -> None:
        sent = [send.numel() for send in sends]
        slot = self._local.next_slot()
        self._local.open(operation, counts=[*sent, *receives])
        table = self._read_counts(operation, slot)
        slots, mine, num = self._local.slots(sends[0].dtype), self._local.index, len(self._local.ranks)
        largest = max((table[a][b] for a in range(num) for b in range(num) if a != b), default=0)
        step = self._local.chunk_elements(largest * num, sends[0].dtype) // num
        count = -(-largest // step)

        def write(k: int, slot: int) -> None:
            for index, send in enumerate(sends):
                piece = send[k * step : (k + 1) * step]
                if index != mine and piece.numel():
                    slots[slot][mine][index * step : index * step + piece.numel()].copy_(piece)

        def read(k: int, slot: int) -> None:
            for index in range(num):
                length = min(step, table[index][mine] - k * step)
                if index != mine and length > 0:
                    sink(index, k * step, slots[slot][index][mine * step : mine * step + length])

        self._local.rounds(operation, count, write, read)

    def _read_counts(self, operation: Operation, slot: int) -> list[tuple[int, ...]]:
        """table[a][b]: what a sends to b. Every member sees what each sends and expects, so all find the same
        difference."""
        at, num = slot * STRIDE_BYTES + COUNTS_AT, len(self._local.ranks)
        rows = [struct.unpack_from(f"<{2 * num}q", self._local.memories[rank].view, at) for rank in self._local.ranks]
        for a in range(num):
            for b in range(num):
                if a != b and rows[a][b] != rows[b][num + a]:
                    source, target = (
                        self._local.health.describe(self._local.ranks[a]),
                        self._local.health.describe(self._local.ranks[b]),
                    )
                    text = f"{source} sends {rows[a][b]} elements to {target}, which expects {rows[b][num + a]}"
                    self._local.health.fail(
                        "mismatch", f"{operation.signature.operation}: {text}", self._local.ranks[a]
                    )
                    raise self._local.health.error(operation.deadline.operation)
        return [row[:num] for row in rows]
