"""What was applied to the values that a worker has, where leases are done: with it, lost ranges are restored."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.control.leases.lease_set import LeaseSet, lease_set
from paceline.server.messages import Need, RangeRecord


class AppliedLeases:
    """Of each range that came with a record, exactly that; of others what the worker knew to be done everywhere."""

    def __init__(self) -> None:
        self._had: dict[int, LeaseSet] = {}
        self._done = LeaseSet()

    def took(self, records: Mapping[int, RangeRecord]) -> None:
        """Values of these ranges are here now, in the place of all that were."""
        self._had = {
            number: lease_set(record.epoch, record.prefix, record.beyond) for number, record in records.items()
        }

    def rely_on(self, need: Need) -> None:
        """What is here suffices for this."""
        self._done = LeaseSet(need.epoch, need.settled)

    def to(self, number: int) -> LeaseSet:
        return self._had.get(number, self._done)
