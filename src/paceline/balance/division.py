"""How many samples of a global batch each worker takes: a pure function of how fast each one is.

A worker takes `fixed_s + per_sample_s * n` seconds for n samples, and a step is as long as its slowest worker. So the
samples are handed out one by one, each to the worker that would be done with it first (of equal ones the lowest rank),
which no other way to divide them can better. That is computed by the level that all would finish at, not one by one.

`minimum` is the fewest samples that a worker which takes part gets, `Pace.limit` the most that fit into its memory.
Where not all of it is possible, this holds, from the first to the last:
- the shares sum to the total;
- if there are too few samples for all, only so many of the quickest take part as there is a minimum for, at least one;
- if the limits together are too low, each worker gets its limit, and what is left over as if there were none: such a
  worker computes in pieces.

Every worker computes this for itself and must come to the same: no function of libm, no builtin `sum` of floats (it
differs between versions of Python), only operations that IEEE 754 defines to the last bit.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple


class Pace(NamedTuple):
    """`limit` is 0 where everything fits."""

    fixed_s: float
    per_sample_s: float
    limit: int = 0

    def time_s(self, samples: int) -> float:
        return self.fixed_s + self.per_sample_s * samples


def divide(total: int, paces: Sequence[Pace], minimum: int = 1) -> tuple[int, ...]:
    """The share of each worker, in the order of `paces`."""
    _check(total, paces, minimum)
    able = _able(total, paces, minimum)
    chosen = [paces[rank] for rank in able]
    lows, highs = _bounds(total, chosen, min(minimum, total))
    sizes = _filled(total, chosen, lows, highs)
    shares = [0] * len(paces)
    for rank, size in zip(able, sizes, strict=True):
        shares[rank] = size
    return tuple(shares)


def finish_s(paces: Sequence[Pace], shares: Sequence[int]) -> float:
    """How long the slowest worker takes."""
    return max(pace.time_s(share) for pace, share in zip(paces, shares, strict=True))


def ideal_s(total: int, paces: Sequence[Pace]) -> float:
    """When all would finish if samples could be cut, and nobody had a minimum or a limit; no division is faster."""
    rate = math.fsum(1.0 / pace.per_sample_s for pace in paces)
    return (total + math.fsum(pace.fixed_s / pace.per_sample_s for pace in paces)) / rate


def _check(total: int, paces: Sequence[Pace], minimum: int) -> None:
    if total < 1 or minimum < 1:
        raise ValueError(f"total={total} and minimum={minimum} must be 1 sample or more")
    if not paces:
        raise ValueError("there is nobody to take a share")
    for rank, pace in enumerate(paces):
        if not (math.isfinite(pace.per_sample_s) and pace.per_sample_s > 0):
            raise ValueError(f"rank {rank} takes {pace.per_sample_s} s a sample; it must be a number above 0")
        if not (math.isfinite(pace.fixed_s) and pace.fixed_s >= 0):
            raise ValueError(f"rank {rank} takes {pace.fixed_s} s a step; it must be a number, 0 or more")
        if pace.limit < 0:
            raise ValueError(f"rank {rank} has the limit {pace.limit}; it must be 0 (none) or more")


def _able(total: int, paces: Sequence[Pace], minimum: int) -> list[int]:
    """The ranks that take part."""
    room = max(1, total // minimum)
    if room >= len(paces):
        return list(range(len(paces)))
    quickest = sorted(range(len(paces)), key=lambda rank: (paces[rank].time_s(minimum), rank))
    return sorted(quickest[:room])


def _bounds(total: int, paces: Sequence[Pace], minimum: int) -> tuple[list[int], list[int]]:
    highs = [min(total, max(minimum, pace.limit or total)) for pace in paces]
    if sum(highs) < total:
        return highs, [total] * len(paces)
    return [minimum] * len(paces), highs


def _filled(total: int, paces: Sequence[Pace], lows: list[int], highs: list[int]) -> list[int]:
    """The `total` samples that are finished first, at least the lows and at most the highs."""
    level = _level(total, paces, lows, highs)
    sizes = [
        min(high, max(low, math.floor((level - pace.fixed_s) / pace.per_sample_s)))
        for pace, low, high in zip(paces, lows, highs, strict=True)
    ]
    missing = total - sum(sizes)
    if missing > 0:
        heap = [(pace.time_s(size + 1), rank) for rank, (pace, size) in enumerate(zip(paces, sizes, strict=True))]
        heap = [entry for entry in heap if sizes[entry[1]] < highs[entry[1]]]
        heapq.heapify(heap)
        for _ in range(missing):
            _, rank = heap[0]
            sizes[rank] += 1
            if sizes[rank] < highs[rank]:
                heapq.heapreplace(heap, (paces[rank].time_s(sizes[rank] + 1), rank))
            else:
                heapq.heappop(heap)
    for _ in range(-missing):
        late = [rank for rank, size in enumerate(sizes) if size > lows[rank]]
        sizes[max(late, key=lambda rank: (paces[rank].time_s(sizes[rank]), rank))] -= 1
    return sizes


def _level(total: int, paces: Sequence[Pace], lows: list[int], highs: list[int]) -> float:
    """When all are done that are neither at their low nor at their high, to within one sample each."""
    free, rest = list(range(len(paces))), total
    while free:
        level = ideal_s(rest, [paces[rank] for rank in free]) if rest > 0 else 0.0
        wanted = {rank: (level - paces[rank].fixed_s) / paces[rank].per_sample_s for rank in free}
        below = [rank for rank in free if wanted[rank] < lows[rank]]
        above = [rank for rank in free if wanted[rank] > highs[rank]]
        if not below and not above:
            return level
        # Of the two, the side that is further off is certain; the other one may come in when that is settled.
        lacking = math.fsum(lows[rank] - wanted[rank] for rank in below)
        beyond = math.fsum(wanted[rank] - highs[rank] for rank in above)
        fixed, bounds = (below, lows) if lacking >= beyond else (above, highs)
        rest -= sum(bounds[rank] for rank in fixed)
        settled = set(fixed)
        free = [rank for rank in free if rank not in settled]
    return max(pace.time_s(low) for pace, low in zip(paces, lows, strict=True))
