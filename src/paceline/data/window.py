"""Which batches are requested ahead of time: pure bookkeeping, no process and no dataset in it.

Every request has a serial number, counted up. Loader workers answer in the order of requests. The window knows the
works from the one that is wanted now to the last that was requested, so that:
- a work that is wanted and was requested is waited for, not requested again;
- when the plan changes, what is wanted now is the next request, before all others;
- every request with a serial below `horizon()` is stale, and its answer is dropped.

Works are told apart by their whole content, not by the tag alone: a mistake in tags costs time, never wrong samples.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class BatchSpec:
    """One batch to collate: the samples at `indices` of `epoch`. `tag` is (generation, step); `version` is that of the
    shares, which may change within a generation, and does not matter where the samples stay the same."""

    tag: tuple[int, int]
    epoch: int
    indices: tuple[int, ...] | npt.NDArray[np.int64]
    version: int = 0

    @property
    def is_empty(self) -> bool:
        return len(self.indices) == 0

    def same_as(self, other: BatchSpec) -> bool:
        return (self.tag, self.epoch) == (other.tag, other.epoch) and np.array_equal(self.indices, other.indices)


# The k-th work after the wanted one under the present plan (k = 1, 2, ...); None where there is none.
Following = Callable[[int], BatchSpec | None]


@dataclass(frozen=True, slots=True)
class LoaderRequest:
    """`work` is None where there is nothing to do: it keeps the number of requests under way constant."""

    serial: int
    work: BatchSpec | None


@dataclass(slots=True)
class _Planned:
    work: BatchSpec
    serial: int | None = None


class PrefetchWindow:
    """The works from the wanted one on, at most `depth` of them after it."""

    def __init__(self, depth: int) -> None:
        # The wanted work may be answered while `depth` others are under way.
        self._limit = depth + 1
        self._planned: deque[_Planned] = deque()
        self._next_serial = 0

    def turn_to(self, work: BatchSpec) -> None:
        """Forget what was planned before `work`; everything, where `work` was not planned."""
        while self._planned and not self._planned[0].work.same_as(work):
            self._planned.popleft()
        if not self._planned:
            self._planned.append(_Planned(work))

    @property
    def wanted(self) -> int | None:
        """The serial of the work that was turned to; None until it is requested."""
        return self._planned[0].serial

    def horizon(self) -> int:
        """Every request with a smaller serial is stale."""
        return self._next_serial if self.wanted is None else self.wanted

    def next_request(self, following: Following) -> LoaderRequest:
        """The first work from the wanted one on that was not requested yet. A work without samples never is."""
        for planned in self._planned:
            if planned.serial is None and not planned.work.is_empty:
                return self._number(planned)
        while len(self._planned) < self._limit:
            work = following(len(self._planned))
            if work is None:
                break
            self._planned.append(_Planned(work))
            if not work.is_empty:
                return self._number(self._planned[-1])
        self._next_serial += 1
        return LoaderRequest(self._next_serial - 1, None)

    def lose_requests(self) -> None:
        """No request that went out will be answered: what is planned is requested anew."""
        for planned in self._planned:
            planned.serial = None

    def pass_over(self) -> None:
        """The wanted work needs no request: it is collated elsewhere."""
        self._number(self._planned[0])

    def finish(self) -> None:
        """The wanted work was answered, or has no samples: it is not under way any more."""
        self._planned.popleft()

    def _number(self, planned: _Planned) -> LoaderRequest:
        planned.serial = self._next_serial
        self._next_serial += 1
        return LoaderRequest(planned.serial, planned.work)
