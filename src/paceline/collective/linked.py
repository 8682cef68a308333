"""The moves of `base.Path` over links, for groups that span hosts.

Broadcast and reduce go along a binomial tree when small (few hops) and along a chain of chunks when large (each link
carries the tensor once); gather, scatter, all-to-all and reduce-scatter are an exchange between pairs, all-gather
goes round the ring.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective.base import Operation, Sink, spans
from paceline.collective.links import Links, Traffic
from paceline.collective.reductions import Reduction
from paceline.collective.ring import CHUNK_BYTES
from paceline.wire.dtypes import raw_bytes

SMALL_BYTES = 64 * 1024


class LinkPath:
    def __init__(self, links: Links) -> None:
        self._links = links
        self._num = len(links.order)

    def barrier(self, operation: Operation) -> None:
        """Dissemination: after round r everybody has heard, directly or not, of 2^(r+1) members."""
        order, position = self._links.order, self._links.position
        traffic = Traffic(self._links, operation)
        distance = 1
        while distance < self._num:
            traffic.send_to(order[(position + distance) % self._num], 0)
            traffic.receive_from(order[(position - distance) % self._num], 0)
            distance *= 2
        traffic.flush()

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> None:
        parent, children = self._family(root, tensor.nbytes)
        traffic = self._open_family(operation, parent, children, down=tensor.nbytes, up=0)
        data = raw_bytes(tensor)
        for low, high in spans(0, len(data), CHUNK_BYTES):
            if parent is not None:
                traffic.fill(parent, data[low:high])
            for child in children:
                traffic.post(child, data[low:high])
        traffic.flush()

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        parent, children = self._family(root, tensor.nbytes)
        traffic = self._open_family(operation, parent, children, down=0, up=tensor.nbytes)
        step = max(1, CHUNK_BYTES // tensor.dtype.itemsize)
        scratch = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
        for low, high in spans(0, tensor.numel(), step):
            received = scratch[: high - low]
            # Only the root's tensor is the caller's result; the others pass a partial one on and keep theirs.
            partial = tensor[low:high] if parent is None else tensor[low:high].clone()
            for child in children:
                traffic.fill(child, raw_bytes(received))
                reduction.combine(partial, received, partial)
            if parent is not None:
                traffic.post(parent, raw_bytes(partial))
            elif reduction.divides:
                partial.div_(self._num)
        traffic.flush()

    def all_gather(self, operation: Operation, outputs: Sequence[torch.Tensor]) -> None:
        order, position, num = self._links.order, self._links.position, self._num
        following, previous = order[(position + 1) % num], order[position - 1]
        sizes = [outputs[rank].nbytes for rank in order]
        traffic = Traffic(self._links, operation)
        traffic.send_to(following, sum(sizes[(position - hop) % num] for hop in range(num - 1)))
        traffic.post(following, raw_bytes(outputs[order[position]]))
        traffic.receive_from(previous, sum(sizes[(position - 1 - hop) % num] for hop in range(num - 1)))
        for hop in range(1, num):
            data = raw_bytes(outputs[order[(position - hop) % num]])
            for low, high in spans(0, len(data), CHUNK_BYTES):
                traffic.fill(previous, data[low:high])
                if hop < num - 1:
                    traffic.post(following, data[low:high])
        traffic.flush()

    def exchange(
        self, operation: Operation, sends: Sequence[torch.Tensor], receives: Sequence[int], sink: Sink
    ) -> None:
        order, position, num = self._links.order, self._links.position, self._num
        dtype = sends[0].dtype
        step = max(1, CHUNK_BYTES // dtype.itemsize)
        scratch = torch.empty(step, dtype=dtype)
        traffic = Traffic(self._links, operation)
        for distance in range(1, num):
            target, source = order[(position + distance) % num], order[(position - distance) % num]
            traffic.send_to(target, sends[target].nbytes)
            traffic.post(target, raw_bytes(sends[target]))
            traffic.receive_from(source, receives[source] * dtype.itemsize)
            for low, high in spans(0, receives[source], step):
                chunk = scratch[: high - low]
                traffic.fill(source, raw_bytes(chunk))
                sink(source, low, chunk)
        traffic.flush()

    def _open_family(
        self, operation: Operation, parent: int | None, children: Sequence[int], *, down: int, up: int
    ) -> Traffic:
        """Open every edge in both directions, also where no byte will follow: so that each end knows that the other
        is in the same operation, and two members that both take themselves for the root find out."""
        traffic = Traffic(self._links, operation)
        for child in children:
            traffic.send_to(child, down)
        if parent is not None:
            traffic.send_to(parent, up)
            traffic.receive_from(parent, down)
        for child in children:
            traffic.receive_from(child, up)
        return traffic

    def _family(self, root: int, num_bytes: int) -> tuple[int | None, list[int]]:
        """The parent and children of this member in the tree that `root` is the root of."""
        order, num = self._links.order, self._num
        start = order.index(root)
        me = (self._links.position - start) % num
        parent, children = binomial(me, num) if num_bytes <= SMALL_BYTES else chain(me, num)
        name = [order[(start + position) % num] for position in range(num)]
        return (None if parent is None else name[parent]), [name[child] for child in children]


def binomial(position: int, num: int) -> tuple[int | None, list[int]]:
    """Parent and children in a binomial tree over 0..num-1 with root 0, the child with most below it first."""
    lowest = position & -position if position else 1 << num.bit_length()
    parent = position - lowest if position else None
    children, distance = [], lowest >> 1
    while distance:
        if position + distance < num:
            children.append(position + distance)
        distance >>= 1
    return parent, children


def chain(position: int, num: int) -> tuple[int | None, list[int]]:
    return (position - 1 if position else None), ([position + 1] if position + 1 < num else [])
