"""All-reduce for several members on several hosts: in memory inside the host, over links between hosts.

The tensor is cut into slices, as many as the host with the fewest members has members: the drivers. Inside each host
every driver reduces its slice over the local members; then the drivers of one slice, one on each host, reduce it over
their links, all slices at once; at last the local members fetch all slices. A byte crosses between hosts as in a ring
of hosts, not of members.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective import ring, tree
from paceline.collective.base import Operation, bounds
from paceline.collective.links import Links
from paceline.collective.neighbourhood import Neighbourhood, nothing
from paceline.collective.reductions import Reduction
from paceline.wire.memory import Arena

# Between hosts, a slice up to this goes by the tree (few hops), a larger one by the ring (few bytes).
TREE_BYTES = 32 * 1024


class Hierarchical:
    """`hosts` lists the ranks of each host, `local` are the members of this host."""

    def __init__(self, links: Links, local: Neighbourhood, arena: Arena, hosts: Sequence[Sequence[int]]) -> None:
        self._links = links
        self._local = local
        self._arena = arena
        self._hosts = hosts
        self._num_drivers = min(len(host) for host in hosts)
        self._slice = local.index if local.index < self._num_drivers else -1

    def all_reduce(self, operation: Operation, tensor: torch.Tensor, reduction: Reduction) -> None:
        """Reduce a flat tensor in place."""
        slices = bounds(tensor.numel(), self._num_drivers)
        locations = self._local.open(operation, self._arena.offset_of(tensor))
        if min(locations) >= 0:
            self._in_place(operation, tensor, slices, reduction, locations)
            return
        self._reduce_inside(operation, tensor, slices, reduction)
        if self._slice >= 0:
            low, high = slices[self._slice]
            self._reduce_between(operation, tensor[low:high], reduction)
        self._gather_inside(operation, tensor, slices)

    def _in_place(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        slices: Sequence[tuple[int, int]],
        reduction: Reduction,
        locations: Sequence[int],
    ) -> None:
        """All local tensors lie in the arena: a driver reads its slice of each there, and writes the result back
        there. Nobody else touches that slice, so one round at the end is enough."""
        local, dtype = self._local, tensor.dtype
        if self._slice >= 0:
            low, high = slices[self._slice]
            own = tensor[low:high]
            others = [
                local.memories[rank].tensor(location + low * dtype.itemsize, high - low, dtype)
                for rank, location in zip(local.ranks, locations, strict=True)
                if rank != local.health.rank
            ]
            for other in others:
                reduction.combine(own, other, own)
            self._reduce_between(operation, own, reduction)
            for other in others:
                other.copy_(own)
        local.rounds(operation, 1, nothing, nothing)

    def _reduce_between(self, operation: Operation, piece: torch.Tensor, reduction: Reduction) -> None:
        drivers = [host[self._slice] for host in self._hosts]
        algorithm = tree.all_reduce if piece.nbytes <= TREE_BYTES else ring.all_reduce
        algorithm(self._links, operation, piece, reduction._replace(divides=False), drivers)
        if reduction.divides:
            piece.div_(sum(len(host) for host in self._hosts))

    def _reduce_inside(
        self,
        operation: Operation,
        tensor: torch.Tensor,
        slices: Sequence[tuple[int, int]],
        reduction: Reduction,
    ) -> None:
        """Each driver combines its slice over the members of this host."""
        local, mine, num = self._local, self._local.index, len(self._local.ranks)
        slots = local.slots(tensor.dtype)
        step = local.chunk_elements(tensor.numel(), tensor.dtype) // len(slices)
        count = -(-max(high - low for low, high in slices) // step)

        def write(k: int, slot: int) -> None:
            for index, (low, high) in enumerate(slices):
                first, last = low + k * step, min(high, low + (k + 1) * step)
                if index != mine and first < last:
                    slots[slot][mine][index * step : index * step + last - first].copy_(tensor[first:last])

        def read(k: int, slot: int) -> None:
            if self._slice < 0:
                return
            low, high = slices[mine]
            first, last = low + k * step, min(high, low + (k + 1) * step)
            own = tensor[first:last]
            for index in range(num):
                if index != mine and first < last:
                    other = slots[slot][index][mine * step : mine * step + last - first]
                    reduction.combine(own, other, own)

        local.rounds(operation, count, write, read)

    def _gather_inside(self, operation: Operation, tensor: torch.Tensor, slices: Sequence[tuple[int, int]]) -> None:
        """Each driver shows its slice to the members of this host."""
        local, mine = self._local, self._local.index
        slots = local.slots(tensor.dtype)
        step = local.chunk_elements(tensor.numel() // len(slices), tensor.dtype)
        count = -(-max(high - low for low, high in slices) // step)

        def write(k: int, slot: int) -> None:
            if self._slice >= 0:
                low, high = slices[mine]
                piece = tensor[low + k * step : min(high, low + (k + 1) * step)]
                slots[slot][mine][: piece.numel()].copy_(piece)

        def read(k: int, slot: int) -> None:
            for index, (low, high) in enumerate(slices):
                if index != mine:
                    piece = tensor[low + k * step : min(high, low + (k + 1) * step)]
                    piece.copy_(slots[slot][index][: piece.numel()])

        local.rounds(operation, count, write, read)
