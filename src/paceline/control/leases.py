"""Who does which samples, where there is no global step: leases, handed out by the coordinator.

A lease is a numbered part of an epoch, done by one worker. A worker holds a few ahead, so that it never waits for the
coordinator. Who is idle gets the next one; when none are left, it gets one that a slower worker holds and has not
started. The leases of a dead worker are handed out again.

Nothing depends on a lease being held by one worker only: each range of the parameters counts a lease once, whoever
brings it. So a desk that has forgotten everything, or all but `prefix` (below which all leases are known to be done),
learns the rest from what the workers say, and what it does not learn is done again and counts once.

Both sides are pure: `Desk` is the coordinator's, `Hand` the worker's.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

import msgspec

from paceline.control.lease_set import LeaseSet
from paceline.control.progress import StepRow

GRANTED_AHEAD = 2  # leases that a worker holds, with the one that it is at


class Done(msgspec.Struct, frozen=True, array_like=True):
    """A lease that is done, with the mean loss of its samples and how long it took."""

    lease: int
    loss: float = 0.0
    seconds: float = 0.0


class LeaseReport(msgspec.Struct, frozen=True):
    """All that matters of a worker's leases: those it holds, the one it is at (-1: none), those it has done and has not
    been told that they are remembered. `heard` is the number of the newest grant it knows, `wants` how many it would
    like to hold. The epoch has `num_leases` of `batch` samples, of which `begun` were done before the run was founded;
    `length` samples in all. `is_finished`: it was told that all are done, and has gone on. All below `prefix` are done:
    it was told that they are remembered, and speaks no more of its own among them."""

    member: str
    epoch: int
    num_leases: int
    heard: int = 0
    wants: int = 0
    held: tuple[int, ...] = ()
    started: int = -1
    done: tuple[Done, ...] = ()
    batch: int = 1
    length: int = 0
    is_finished: bool = False
    begun: LeaseSet = msgspec.field(default_factory=LeaseSet)
    prefix: int = 0


class LeaseGrant(msgspec.Struct, frozen=True):
    """The leases that a worker holds, as the coordinator sees it. All below `settled` are done, and all below `prefix`
    are remembered as done; `is_finished` when all of the epoch are. `is_stopped`: no more leases are handed out,
    because the run is to end."""

    term: int
    number: int
    member: str
    epoch: int
    leases: tuple[int, ...] = ()
    settled: int = 0
    prefix: int = 0
    is_finished: bool = False
    is_stopped: bool = False


class Desk:
    """The coordinator's side. `remembered` is (epoch, prefix) of an earlier coordinator; all epochs before that one are
    finished. That an epoch is finished is remembered before anybody hears of it."""

    def __init__(self, remembered: tuple[int, int] = (-1, 0)) -> None:
        self.remembered = remembered
        self._epoch = -1
        self._num_leases = 0
        self._done = LeaseSet()
        self._holder: dict[int, str] = {}
        self._reports: dict[str, LeaseReport] = {}
        self._granted: dict[str, dict[int, int]] = {}  # by member: its leases, and the number of the grant of each
        self._next = 0
        self._returned: list[int] = []
        self._number = 0
        self._told: dict[str, tuple[object, ...]] = {}
        self._late: dict[str, int] = {}  # workers that ask for an epoch that is over
        self._is_stopped = False
        self._is_cut_short = False
        self.whole = -1  # the last epoch of which all leases were done when it was stopped

    @property
    def done(self) -> LeaseSet:
        return self._done

    @property
    def epoch(self) -> int:
        return self._epoch

    def stop(self) -> None:
        """Hand out nothing more. An epoch of which all leases are done by then is finished, any other never is, so that
        all workers end alike; what was under way counts all the same. One that has not heard the workers yet goes by
        what an earlier one may have told them."""
        if not self._is_stopped:
            self._is_stopped = True
            self._is_cut_short = not self._is_finished()
            self.whole = max(-1, self.remembered[0] - 1, -1 if self._is_cut_short else self._epoch)

    def stop_again(self, whole: int) -> None:
        """As an earlier coordinator did, of which all leases up to the epoch `whole` were done then; -1 for none."""
        self._is_stopped = self._is_cut_short = True
        self.whole = whole

    def forget(self) -> None:
        """The run is founded anew, from a checkpoint or from nothing: what was done counts as far as the workers' next
        reports say that they began with it."""
        self.remembered = (-1, 0)
        self._epoch, self._num_leases, self._next = -1, 0, 0
        self._done = LeaseSet()
        for kept in (self._holder, self._reports, self._granted, self._returned, self._told, self._late):
            kept.clear()

    def take(self, report: LeaseReport) -> list[Done]:
        """A worker's report; the newest counts, and the shell keeps their order. Returns what was not known to be
        done."""
        if report.epoch > self._epoch:
            self._open(report)
        self._late.pop(report.member, None)
        if report.epoch < self._epoch:
            self._late[report.member] = report.epoch
            return []
        self._reports[report.member] = report
        if report.begun.epoch == self._epoch:
            self._done.update(report.begun)
        self._done.update(LeaseSet(self._epoch, report.prefix))  # more than is known here if the journal was lost
        granted = self._granted.setdefault(report.member, {})
        news = [one for one in report.done if not self._done.has(self._epoch, one.lease)]
        for one in news:
            self._done.add(self._epoch, one.lease)
        if report.is_finished:  # told so by a desk that knew more
            self._done = LeaseSet(self._epoch, self._num_leases)
        held = set(report.held)
        for lease in [lease for lease, number in granted.items() if number <= report.heard and lease not in held]:
            self._let_go(report.member, lease)  # done, or put back
        for lease in held - granted.keys():
            if not self._done.has(self._epoch, lease) and lease not in self._holder:
                self._hand(report.member, lease)  # this desk had forgotten
        return news

    def _open(self, report: LeaseReport) -> None:
        self._epoch, self._num_leases = report.epoch, report.num_leases
        self._is_cut_short = self._is_stopped and report.epoch > self.whole
        self._done = LeaseSet(report.epoch, self._remembered_prefix())
        self._holder.clear()
        self._reports.clear()
        self._granted.clear()
        self._returned.clear()
        self._next = self._done.prefix

    def bury(self, member: str) -> None:
        """A worker is gone: others do its leases."""
        self._reports.pop(member, None)
        self._told.pop(member, None)
        self._late.pop(member, None)
        for lease in list(self._granted.pop(member, {})):
            self._put_back(lease)

    def grants(self, term: int, asked: Iterable[str] = ()) -> list[LeaseGrant]:
        """What to tell whom: those who asked, and those for whom something is new."""
        if self._is_stopped:
            for granted in self._granted.values():
                granted.clear()
            self._holder.clear()
        else:
            self._hand_returned()
        for member in sorted(self._reports, key=lambda name: len(self._granted[name])):
            self._serve(self._reports[member])
        found = []
        for member in asked:
            if member in self._late:
                self._number += 1
                found.append(LeaseGrant(term, self._number, member, self._late[member], is_finished=True))
        for member in self._reports:
            leases = tuple(sorted(self._granted.get(member, ())))
            content = (self._epoch, leases, self._is_finished(), self._is_cut_short)
            if self._told.get(member) == content and member not in asked:
                continue
            self._told[member] = content
            self._number += 1
            for lease, number in self._granted.get(member, {}).items():
                if not number:
                    self._granted[member][lease] = self._number
            settled = self._done.prefix
            found.append(
                LeaseGrant(
                    term,
                    self._number,
                    member,
                    self._epoch,
                    leases,
                    settled,
                    self._remembered_prefix(),
                    self._is_finished(),
                    self._is_cut_short,
                )
            )
        return found

    def _hand_returned(self) -> None:
        """What a dead worker leaves behind goes to others at once, also if they hold enough: where leases wait for
        earlier ones, everybody may wait for these."""
        takers = [member for member, report in self._reports.items() if report.wants]
        while takers and self._returned:
            lease = heapq.heappop(self._returned)
            if not self._done.has(self._epoch, lease) and lease not in self._holder:
                self._hand(min(takers, key=lambda member: len(self._granted[member])), lease)

    def _serve(self, report: LeaseReport) -> None:
        granted = self._granted[report.member]
        while report.wants and not self._is_stopped:
            lease = self._first_free()
            # A desk that has forgotten who held what finds leases free that those which are held may be waiting for.
            is_waited_for = 0 <= lease < min(granted, default=0)
            if len(granted) >= report.wants and not is_waited_for:
                return
            if lease < 0 and not granted:
                lease = self._take_back(report.member)
            if lease < 0:
                return
            self._hand(report.member, lease)

    def _first_free(self) -> int:
        """The first lease that was never handed out; -1 if there is none."""
        while self._next < self._num_leases:
            if not self._done.has(self._epoch, self._next) and self._next not in self._holder:
                return self._next
            self._next += 1
        return -1

    def _take_back(self, taker: str) -> int:
        """The last lease that somebody holds and has not started; from who holds most."""
        spare: dict[str, list[int]] = {}
        for lease, member in self._holder.items():
            if member != taker and member in self._reports and lease != self._first_of(member):
                spare.setdefault(member, []).append(lease)
        if not spare:
            return -1
        giver = max(spare, key=lambda name: (len(spare[name]), name))
        lease = max(spare[giver])
        del self._granted[giver][lease]
        del self._holder[lease]
        return lease

    def _first_of(self, member: str) -> int:
        """The lease that a worker is at, or will be at next."""
        started = self._reports[member].started
        return started if started >= 0 else min(self._granted[member])

    def _hand(self, member: str, lease: int) -> None:
        self._holder[lease] = member
        self._granted[member][lease] = 0  # the number of its grant follows

    def _let_go(self, member: str, lease: int) -> None:
        del self._granted[member][lease]
        self._put_back(lease)

    def _put_back(self, lease: int) -> None:
        self._holder.pop(lease, None)
        if not self._done.has(self._epoch, lease):
            heapq.heappush(self._returned, lease)

    def _is_finished(self) -> bool:
        return self._epoch >= 0 and len(self._done) >= self._num_leases and not self._is_cut_short

    def to_remember(self) -> tuple[int, int] | None:
        """(epoch, prefix), if it is more than what is remembered; the next epoch if this one is finished."""
        now = (self._epoch + 1, 0) if self._is_finished() else (self._epoch, self._done.prefix)
        return now if now > self.remembered else None

    def _remembered_prefix(self) -> int:
        """Of the epoch that is open."""
        epoch, prefix = self.remembered
        if epoch > self._epoch:
            return self._num_leases
        return prefix if epoch == self._epoch else 0


class Hand:
    """A worker's side, for one epoch after the other."""

    def __init__(self, member: str, num_ahead: int = GRANTED_AHEAD) -> None:
        self._member = member
        self._num_ahead = num_ahead
        self._order = (0, 0)
        self.epoch = -1
        self._num_leases = 0
        self._begun = LeaseSet()
        self._held: list[int] = []
        self._done: dict[int, Done] = {}
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
        wants = 0 if self.is_leaving or self.is_finished else self._num_ahead
        done = tuple(self._done[lease] for lease in sorted(self._done))
        return LeaseReport(
            self._member,
            self.epoch,
            self._num_leases,
            self._order[1] if self._order[0] else 0,
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
        order = (grant.term, grant.number)
        if order <= self._order or grant.epoch != self.epoch:
            return
        self._order = order
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
        self._done[lease] = Done(lease, loss, seconds)
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


def row_of(report: LeaseReport, done: Done, generation: int) -> StepRow:
    """A lease that is done, as a row of the run's database: as if leases were steps."""
    position = done.lease * report.batch
    return StepRow(
        operation=report.epoch * report.num_leases + done.lease + 1,
        generation=generation,
        epoch=report.epoch,
        position=position,
        count=min(report.batch, report.length - position),
        loss=done.loss,
        seconds=done.seconds,
    )


def rows_of_begun(report: LeaseReport, generation: int) -> tuple[StepRow, ...]:
    """Those of the leases that were done before the run was founded, of which nothing else is known here."""
    leases = [*range(report.begun.prefix), *sorted(report.begun.beyond)]
    return tuple(row_of(report, Done(lease, math.nan, 0.0), generation) for lease in leases)
