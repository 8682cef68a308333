"""A worker's leases, between the training thread, which does them, and the courier's, which brings them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum

from paceline.control.leases.holder import LeaseHolder
from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseGrant, LeaseReport


class LeaseEnd(Enum):
    """Why there is no next lease."""

    FINISHED = "all leases of the epoch are done"
    STOPPED = "the run is to end"


class LeaseQueue:
    """`speak` lets the coordinator hear at once."""

    def __init__(self, member: str, speak: Callable[[], None]) -> None:
        self._hand = LeaseHolder(member)
        self._speak = speak
        self._changed = threading.Condition()

    # -- the courier's side ------------------------------------------------------------------------------------------

    def report(self) -> LeaseReport | None:
        with self._changed:
            return self._hand.report() if self._hand.epoch >= 0 else None

    def hear(self, grant: LeaseGrant) -> None:
        with self._changed:
            self._hand.hear(grant)
            self._changed.notify_all()

    # -- the training thread's side ----------------------------------------------------------------------------------

    def open(self, epoch: int, num_leases: int, begun: LeaseSet, batch: int, length: int) -> None:
        with self._changed:
            self._hand.open(epoch, num_leases, begun, batch, length)
        self._speak()

    def next(self, wait_s: float) -> int | LeaseEnd | None:
        """The lease to do now; None if none came within this time."""
        with self._changed:
            self._changed.wait_for(self._has_news, wait_s)
            if self._hand.is_finished:
                return LeaseEnd.FINISHED
            if self._hand.is_stopped:
                return LeaseEnd.STOPPED
            lease = self._hand.start()
            return lease if lease >= 0 else None

    def _has_news(self) -> bool:
        return self._hand.is_finished or self._hand.is_stopped or self._hand.num_held() > 0

    def gives_way(self) -> bool:
        """Whether the lease that was taken, and is not begun, is put back: an earlier one came, or the end."""
        with self._changed:
            return self._hand.gives_way()

    @property
    def settled(self) -> int:
        """All leases of the epoch below are done."""
        with self._changed:
            return self._hand.settled

    def known_done(self, epoch: int) -> LeaseSet:
        """What of an epoch this worker knows to be done."""
        with self._changed:
            return self._hand.known_done() if self._hand.epoch == epoch else LeaseSet(epoch)

    @property
    def following(self) -> int:
        """The lease that would be done after the present one; -1 if none is held."""
        with self._changed:
            return self._hand.following()

    def finish(self, lease: int, loss: float, seconds: float) -> None:
        with self._changed:
            self._hand.finish(lease, loss, seconds)
        self._speak()

    def leave(self) -> None:
        """Take no more."""
        with self._changed:
            self._hand.is_leaving = True
        self._speak()
