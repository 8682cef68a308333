"""The coordinator's side of leases: hands them out, and knows which are done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseDone, LeaseGrant, LeaseReport


class LeaseDispatcher:
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

    def take(self, report: LeaseReport) -> list[LeaseDone]:
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
        if report.is_finished:  # told so by one that knew more
            self._done = LeaseSet(self._epoch, self._num_leases)
        held = set(report.held)
        for lease in [lease for lease, number in granted.items() if number <= report.heard and lease not in held]:
            self._let_go(report.member, lease)  # done, or put back
        for lease in held - granted.keys():
            if not self._done.has(self._epoch, lease) and lease not in self._holder:
                self._hand(report.member, lease)  # this one had forgotten
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
            # One that has forgotten who held what finds leases free that those which are held may be waiting for.
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
