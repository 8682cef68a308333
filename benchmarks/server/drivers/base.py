"""The contract of a contender, and what all of them are given to do."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.server.plan import ZIPF, Plan

NUM_BATCHES = 10  # of ids, that each worker goes through again and again
LEARNING_RATE = 0.01


class Worker(Protocol):
    """In a process of its own; `do` is one iteration of a measure of the plan."""

    def do(self, measure: str, number: int) -> None: ...

    def close(self) -> None: ...


class Driver(Protocol):
    def obstacle(self) -> str:
        """Why it cannot be measured here; empty if it can."""

    def serve(self, plan: Plan, told: Any) -> None:
        """The server's process: send its address through `told`, then serve until something arrives there."""

    def worker(self, plan: Plan, address: Any, number: int) -> Worker: ...


def batches(plan: Plan, number: int) -> list[npt.NDArray[np.int64]]:
    """The ids that a worker asks for: by Zipf's law, in an order in which neighbours have nothing in common."""
    random = np.random.default_rng(number)
    weights = 1.0 / np.arange(1, plan.size + 1) ** ZIPF
    cumulative = np.cumsum(weights / weights.sum())
    ranks = [np.searchsorted(cumulative, random.random(plan.batch)) for _ in range(NUM_BATCHES)]
    return [id_of(ranks_of_batch) for ranks_of_batch in ranks]


def id_of(ranks: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The id of the row of each rank: any number, as ids are."""
    with np.errstate(over="ignore"):
        return (ranks.astype(np.int64) + 1) * np.int64(-7046029254386353131)


def gradients(plan: Plan, number: int, rows: int) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = np.random.default_rng(1000 + number).random((rows, plan.dim), dtype=np.float32)
    return found - np.float32(0.5)
