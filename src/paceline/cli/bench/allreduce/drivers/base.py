"""The contract of a library under measurement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Native = TypeVar("Native")

_PERIOD = 251  # prime, so that a block in the wrong place shows
_WEIGHTS = 16


class Buffer(Generic[Native]):
    """Memory to reduce: `native` is what the library takes, `array` the same bytes seen by numpy."""

    def __init__(self, native: Native, array: NDArray[np.float32]) -> None:
        self.native = native
        self.array = array

    def clear(self) -> None:
        """Zeros: sums of them stay finite however often they are reduced in place."""
        self.array[:] = 0

    def fill(self, rank: int) -> None:
        """Numbers that differ along the buffer and between ranks."""
        self._each_stretch(1, _weight(rank), compare=False)

    def holds_sum(self, num_ranks: int) -> bool:
        """Whether this is exactly the sum of what all ranks filled in."""
        total = sum(_weight(rank) for rank in range(num_ranks))
        return self._each_stretch(num_ranks, total, compare=True)

    def _each_stretch(self, factor: int, offset: int, *, compare: bool) -> bool:
        # In stretches, so that checking a large buffer does not need a second one.
        pattern = np.tile(np.arange(_PERIOD, dtype=np.float32) * factor + offset, 1024)
        for start in range(0, len(self.array), len(pattern)):
            stretch = self.array[start : start + len(pattern)]
            if not compare:
                stretch[:] = pattern[: len(stretch)]
            elif not np.array_equal(stretch, pattern[: len(stretch)]):
                return False
        return True


class AllReduceDriver(ABC, Generic[Native]):
    """One rank of one library. Made in a worker, used from its only thread; a call blocks until it is done.

    It is made with what the ranks find each other by: `(rendezvous, *, rank, num_ranks, num_threads)`; rank -1 where a
    launcher gave the rank and the library knows it.

    No call takes a deadline: the bench ends the process when an answer takes too long.
    """

    rank: int
    num_ranks: int
    version: str

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""

    @abstractmethod
    def buffer(self, num_elements: int, tensors: str) -> Buffer[Native]:
        """A float32 buffer. Every rank asks for the same ones in the same order; the worker keeps them."""

    @abstractmethod
    def all_reduce(self, buffer: Buffer[Native], algorithm: str) -> None:
        """Sums the buffer over all ranks, in place. The timed call: no work beside the library's own."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group; called once, by every rank."""


def _weight(rank: int) -> int:
    # Powers of two: no rank counted twice can stand in for another one left out.
    return 1 << (rank % _WEIGHTS)
