"""All-reduce over trees, for small tensors: recursive doubling.

Every member is the root of a binomial tree over the others; the trees share their edges, so in round r each member
exchanges its partial result with the one whose position differs in bit r, and after log2(n) rounds all have
everything. A single tree needs twice the rounds (up to its root and down again), and a ring 2(n-1); in exchange each
round here carries the whole tensor, so the ring takes over as tensors grow. Where n is no power of two, the members
past the largest one hand their tensor to a partner first and get the result at the end.

Both partners combine the same two operands in the same order, so all members end with the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.collective.base import Operation, spans
from paceline.collective.links import Links, Traffic
from paceline.collective.reductions import Reduction
from paceline.wire.dtypes import raw_bytes

PIECE_BYTES = 1 << 20  # bounds the scratch memory


def all_reduce(
    links: Links,
    operation: Operation,
    tensor: torch.Tensor,
    reduction: Reduction,
    members: Sequence[int] | None = None,
) -> None:
    """Reduce a flat tensor in place over `members` (all, unless given)."""
    ranks = list(members) if members is not None else links.order
    position, num = ranks.index(links.health.rank), len(ranks)
    core = 1 << (num.bit_length() - 1)
    traffic = Traffic(links, operation)
    partners = _partners(position, num, core)
    for partner in partners:
        traffic.send_to(ranks[partner], tensor.nbytes)
    for partner in partners:
        traffic.receive_from(ranks[partner], tensor.nbytes)

    step = max(1, PIECE_BYTES // tensor.dtype.itemsize)
    scratch = torch.empty(min(step, tensor.numel()), dtype=tensor.dtype)
    for low, high in spans(0, tensor.numel(), step):
        _reduce_piece(traffic, ranks, position, core, tensor[low:high], scratch[: high - low], reduction)
    if reduction.divides and position < core:
        tensor.div_(num)
    for extra in range(core, num):
        if position == extra - core:
            traffic.post(ranks[extra], raw_bytes(tensor))
        elif position == extra:
            traffic.fill(ranks[extra - core], raw_bytes(tensor))
    traffic.flush()


def _partners(position: int, num: int, core: int) -> list[int]:
    if position >= core:
        return [position - core]
    exchanges = [position ^ (1 << bit) for bit in range(core.bit_length() - 1)]
    return exchanges + ([position + core] if position + core < num else [])


def _reduce_piece(
    traffic: Traffic,
    ranks: Sequence[int],
    position: int,
    core: int,
    piece: torch.Tensor,
    scratch: torch.Tensor,
    reduction: Reduction,
) -> None:
    data, received = raw_bytes(piece), raw_bytes(scratch)
    if position >= core:
        traffic.post(ranks[position - core], data)
        traffic.flush()
        return
    if position + core < len(ranks):
        traffic.fill(ranks[position + core], received)
        reduction.combine(piece, scratch, piece)
    for bit in range(core.bit_length() - 1):
        partner = position ^ (1 << bit)
        traffic.post(ranks[partner], data)
        traffic.fill(ranks[partner], received)
        traffic.flush()
        lower, higher = (piece, scratch) if position < partner else (scratch, piece)
        reduction.combine(lower, higher, piece)
