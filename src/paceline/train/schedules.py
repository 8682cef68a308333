"""Learning-rate schedules where every worker does only some of the updates.

The body of a script moves a schedule on after each of its own leases. For the leases that others do it is moved on
here, as the body does it, when they are known to be done. So at the end of an epoch a schedule stands on all workers
where it would stand in one process, if its body has run there at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class Schedules:
    def __init__(self, stateful: Sequence[Any]) -> None:
        self._schedules = [one for one in stateful if isinstance(one, LRScheduler)]
        self._rates: list[int] | None = None  # how often the body moves each on after a lease, once that is seen
        self._seen = [one.last_epoch for one in self._schedules]
        self._own: set[int] = set()  # leases of this epoch for which the body has run here
        self._num_others = 0  # leases of others in this epoch for which they were moved on
        self._owed = 0  # the same of earlier epochs, for which they were not

    def begin(self, num_moved: int = 0) -> None:
        """An epoch begins; or this worker got a state in which they were moved on for so many of its leases."""
        self._own.clear()
        self._num_others = num_moved

    @property
    def num_moved(self) -> int:
        """The leases of this epoch for which they were moved on."""
        return len(self._own) + self._num_others

    def move_on(self, settled: int) -> None:
        """All leases of the epoch below `settled` are done."""
        num_others = settled - sum(lease < settled for lease in self._own)
        missing = num_others - self._num_others + self._owed
        if missing > 0 and self._rates is not None:
            for schedule, rate in zip(self._schedules, self._rates, strict=True):
                for _ in range(rate * missing):
                    schedule.step()
            self._num_others, self._owed = num_others, 0
        self._seen = [one.last_epoch for one in self._schedules]

    def end(self, num_leases: int) -> None:
        """All leases of the epoch are done."""
        self.move_on(num_leases)
        if self._rates is None:
            self._owed += num_leases - self.num_moved

    def body_ran(self, lease: int) -> None:
        """The body has run for a lease: what did it do?"""
        self._rates = [max(0, one.last_epoch - seen) for one, seen in zip(self._schedules, self._seen, strict=True)]
        self._own.add(lease)
