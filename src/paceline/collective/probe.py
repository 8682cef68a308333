"""Measures, when a group forms, how long each all-reduce takes at a few sizes, and makes the model that `auto`
chooses by.

All members measure the same things in the same order and agree on the slowest member's times, so all get the same
model and make the same choices. The probe stops when the next size would take it past its budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from paceline.collective.choice import CostModel

SIZES_BYTES = (1 << 10, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
NUM_REPEATS = 5
BUDGET_S = 1.0

Updater = Callable[[torch.Tensor, str, str], object]
Empty = Callable[[tuple[int, ...]], torch.Tensor]


def probe(all_reduce: Updater, empty: Empty, algorithms: Sequence[str]) -> CostModel:
    """`all_reduce(tensor, reduction, algorithm)` and `empty` are those of the group, called on all members."""
    began = time.monotonic()
    points: dict[str, list[tuple[int, float]]] = {algorithm: [] for algorithm in algorithms}
    for num_bytes in SIZES_BYTES:
        times = _measure(all_reduce, empty((num_bytes // 4,)).zero_(), algorithms)
        agreed = torch.tensor([*times, time.monotonic() - began], dtype=torch.float64)
        all_reduce(agreed, "max", algorithms[0])
        *slowest, spent_s = agreed.tolist()
        for algorithm, seconds in zip(algorithms, slowest, strict=True):
            points[algorithm].append((num_bytes, seconds))
        # The next size is at most 16 times as large, and one round of it warms up.
        if spent_s + sum(slowest) * 16 * (NUM_REPEATS + 1) > BUDGET_S:
            break
    return CostModel({algorithm: tuple(found) for algorithm, found in points.items()})


def _measure(all_reduce: Updater, tensor: torch.Tensor, algorithms: Sequence[str]) -> list[float]:
    """The quickest of a few rounds each: noise only ever adds."""
    best = [float("inf")] * len(algorithms)
    for attempt in range(NUM_REPEATS + 1):
        for index, algorithm in enumerate(algorithms):
            began = time.perf_counter()
            all_reduce(tensor, "max", algorithm)
            if attempt:
                best[index] = min(best[index], time.perf_counter() - began)
    return best
