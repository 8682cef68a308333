"""How a global batch is divided among ranks: pure functions of counts and shares.

`split` cuts positions 0..count-1 into consecutive ranges, one a rank, in proportion to integer shares by largest
remainder (ties go to the lowest rank). The sizes sum to count exactly; if count is the sum of the shares, each rank
gets exactly its share; a share of 0 gets nothing.

`minimum` keeps ranks from getting too little (a BatchNorm layer raises on one sample): each rank gets at least
`minimum` or nothing. While the part of a rank would be smaller, one rank stands aside, that with the smallest part
(of equal ones the smallest share, then the highest rank), and the others divide its part in proportion. If count itself
is smaller than `minimum`, the rank with the largest share (of equal ones the lowest) gets all of it.
"""

from __future__ import annotations

from collections.abc import Sequence


def split(count: int, shares: Sequence[int], minimum: int = 1) -> tuple[range, ...]:
    """The positions of each rank. The same on every rank that knows the same numbers."""
    if count < 0:
        raise ValueError(f"count={count}: there are 0 samples or more to divide")
    if minimum < 1:
        raise ValueError(f"minimum={minimum}: a rank that takes part gets 1 sample or more")
    if any(share < 0 for share in shares):
        raise ValueError(f"shares={list(shares)}: a share is 0 or more")
    if count and not sum(shares):
        raise ValueError(f"shares={list(shares)}: nobody takes any of the {count} samples; give a rank a share")
    return _consecutive(_sizes(count, shares, minimum))


def split_among_all(count: int, shares: Sequence[int]) -> tuple[range, ...]:
    """The positions of each rank, where no rank may be without: each gets one or more, which those with the most give
    up if need be. If there are not enough for that, or a rank has no share, one rank gets all of them."""
    parts = split(count, shares)
    if not count or all(parts):
        return parts
    if count < len(shares) or not all(shares):
        largest = max(range(len(shares)), key=lambda rank: (shares[rank], -rank))
        return _consecutive([count if rank == largest else 0 for rank in range(len(shares))])
    sizes = [len(part) for part in parts]
    for rank in (rank for rank, size in enumerate(parts) if not size):
        sizes[max(range(len(sizes)), key=lambda other: (sizes[other], -other))] -= 1
        sizes[rank] += 1
    return _consecutive(sizes)


def _consecutive(sizes: Sequence[int]) -> tuple[range, ...]:
    ranges = []
    start = 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return tuple(ranges)


def _sizes(count: int, shares: Sequence[int], minimum: int) -> list[int]:
    if count == 0:
        return [0] * len(shares)
    remaining = list(shares)
    while True:
        sizes = _largest_remainder(count, remaining)
        small = [rank for rank, size in enumerate(sizes) if remaining[rank] and size < minimum]
        taking = sum(1 for share in remaining if share)
        if not small or taking == 1:
            return sizes
        # By share among equal sizes, so that the slower machine is the one that rests.
        aside = min(small, key=lambda rank: (sizes[rank], remaining[rank], -rank))
        remaining[aside] = 0


def _largest_remainder(count: int, shares: Sequence[int]) -> list[int]:
    total = sum(shares)
    sizes = [count * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(count * shares[rank] % total), rank))
    for rank in by_remainder[: count - sum(sizes)]:
        sizes[rank] += 1
    return sizes
