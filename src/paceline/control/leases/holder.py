"""A worker's side of leases: those it holds, and those it has done."""

from __future__ import annotations

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import GRANTED_AHEAD, LeaseDone, LeaseGrant, LeaseReport
from paceline.control.ordering import Newest


class LeaseHolder:
    """A worker's side, for one epoch after the other."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._newest = Newest()
        self.epoch = -1
        self._num_leases = 0
        self._begun = LeaseSet()
        self._held: list[int] = []
        self._done: dict[int, LeaseDone] = {}
        self._started = -1
        self._batch = 1
        self._length = 0
        self.settled = 0
        self._prefix = 0  # below which all are remembered as done
        self.is_finished = False
        self.is_stopped = False
        self.is_leaving = False

    def open(self, epoch: int, num_leases: int, begun: LeaseSet, batch: int = 1, length: int = 0) -> None:
        """An epoch begins."""
        self.epoch, self._num_leases, self._begun = epoch, num_leases, begun
        self._batch, self._length = batch, length
        self._held, self._done, self._started = [], {}, -1
        self.settled = begun.prefix if begun.epoch == epoch else 0
        self._prefix = 0
        self.is_finished = False

    def report(self) -> LeaseReport:
        wants = 0 if self.is_leaving or self.is_finished else GRANTED_AHEAD
        done = tuple(self._done[lease] for lease in sorted(self._done))
        return LeaseReport(
            self._member,
            self.epoch,
            self._num_leases,
            self._newest.number,
            wants,
            tuple(self._held),
            self._started,
            done,
            self._batch,
            self._length,
            self.is_finished,
            self._begun,
            self._prefix,
        )

    def hear(self, grant: LeaseGrant) -> None:
        if grant.epoch != self.epoch or not self._newest.passes(grant):
            return
        self._prefix = max(self._prefix, grant.prefix)
        self._done = {lease: done for lease, done in self._done.items() if lease >= grant.prefix}
        kept = [self._started] if self._started >= 0 else []
        self._held = sorted({*kept, *(lease for lease in grant.leases if lease not in self._done)})
        self.settled = max(self.settled, grant.settled)
        self.is_finished = self.is_finished or grant.is_finished
        self.is_stopped = grant.is_stopped

    def start(self) -> int:
        """The lease to do now, the lowest; -1 if none is there."""
        if self._started < 0 and self._held:
            self._started = self._held[0]
        return self._started

    def gives_way(self) -> bool:
        """Whether an earlier lease than the one that was started came, or the end: then that one is put back."""
        if (self._held and self._held[0] < self._started) or self.is_stopped or self.is_finished:
            self._started = -1
            return True
        return False

    def finish(self, lease: int, loss: float = 0.0, seconds: float = 0.0) -> None:
        """A lease that was started is done."""
        self._done[lease] = LeaseDone(lease, loss, seconds)
        self._held = [other for other in self._held if other != lease]
        if self._started == lease:
            self._started = -1

    def known_done(self) -> LeaseSet:
        found = LeaseSet(self.epoch, self.settled)
        found.add_all(self._done)
        return found

    def following(self) -> int:
        """The lease that comes after the one that was started; -1 if none is there."""
        return min((lease for lease in self._held if lease != self._started), default=-1)

    def num_held(self) -> int:
        return len(self._held)
