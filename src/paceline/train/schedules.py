"""Learning-rate schedules where every worker does only some of the updates.

The body of a script moves a schedule on after each of its own leases. For the leases that others do it is moved on
here, as the body does it, so that a schedule stands where it would stand in one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    def __init__(self, stateful: Sequence[Any]) -> None:
        self._schedules = [one for one in stateful if isinstance(one, LRScheduler)]
        self._rates = [0] * len(self._schedules)  # how often the body moves each on after a lease
        self._seen = [one.last_epoch for one in self._schedules]
        self._stands_at = 0  # the lease before which they stand

    def begin(self, lease: int = 0) -> None:
        """An epoch begins, or this worker comes in at this lease."""
        self._stands_at = lease

    def move_to(self, lease: int) -> None:
        """Before the lease, or the end of the epoch."""
        missing = lease - self._stands_at
        if missing > 0:
            for schedule, rate in zip(self._schedules, self._rates, strict=True):
                for _ in range(rate * missing):
                    schedule.step()
            self._stands_at = lease
        self._seen = [one.last_epoch for one in self._schedules]

    def body_ran(self) -> None:
        """The body has run for a lease: what did it do?"""
        self._rates = [max(0, one.last_epoch - seen) for one, seen in zip(self._schedules, self._seen, strict=True)]
        self._stands_at += 1
