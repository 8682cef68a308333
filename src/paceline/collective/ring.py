"""All-reduce around a ring: scatter-reduce, then all-gather, in small chunks that are passed on as soon as they are
complete.

The tensor is cut into as many slices as there are members. In step s of the first half a member receives slice p-s-1,
combines it with its own, and passes it on; after n-1 steps it holds the whole result of slice p+1. In the second half
the results go round once more. Each member sends and receives 2(n-1)/n of the tensor: no algorithm needs less of the
slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective.base import Operation, bounds, spans
from paceline.collective.links import Links, Traffic
from paceline.collective.reductions import Reduction
from paceline.wire.dtypes import raw_bytes

CHUNK_BYTES = 128 * 1024


def all_reduce(
    links: Links,
    operation: Operation,
    tensor: torch.Tensor,
    reduction: Reduction,
    members: Sequence[int] | None = None,
) -> None:
    """Reduce a flat tensor in place over `members` (all, unless given), which lists ranks in the order of the
    ring."""
    ring = list(members) if members is not None else links.order
    if len(ring) == 1:
        return
    position, num = ring.index(links.health.rank), len(ring)
    following, previous = ring[(position + 1) % num], ring[position - 1]
    slices = bounds(tensor.numel(), num)
    itemsize = tensor.dtype.itemsize
    step = max(1, CHUNK_BYTES // itemsize)
    scratch = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
    data, scratch_data = raw_bytes(tensor), raw_bytes(scratch)

    def slice_at(offset: int) -> list[tuple[int, int]]:
        return spans(*slices[(position + offset) % num], step)

    def pass_on(low: int, high: int) -> None:
        traffic.post(following, data[low * itemsize : high * itemsize])

    traffic = Traffic(links, operation)
    traffic.send_to(following, itemsize * _travelling(slices, position, num))
    for low, high in slice_at(0):
        pass_on(low, high)
    traffic.receive_from(previous, itemsize * _travelling(slices, position - 1, num))

    for hop in range(1, num):
        for low, high in slice_at(-hop):
            traffic.fill(previous, scratch_data[: (high - low) * itemsize])
            chunk = tensor[low:high]
            reduction.combine(scratch[: high - low], chunk, chunk)
            if reduction.divides and hop == num - 1:
                chunk.div_(num)
            pass_on(low, high)

    for hop in range(num - 1):
        for low, high in slice_at(-hop):
            # Its old bytes have left long ago: the result that arrives here was made of them.
            traffic.fill(previous, data[low * itemsize : high * itemsize])
            if hop < num - 2:
                pass_on(low, high)
    traffic.flush()


def _travelling(slices: Sequence[tuple[int, int]], position: int, num: int) -> int:
    """Elements that the member at `position` sends: n-1 slices on the way in, n-1 results on the way out."""
    sizes = [high - low for low, high in slices]
    inward = sum(sizes[(position - hop) % num] for hop in range(num - 1))
    outward = sum(sizes[(position + 1 - hop) % num] for hop in range(num - 1))
    return inward + outward
