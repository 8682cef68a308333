"""This worker's side of the shares: how a batch is divided now, and how long this worker was busy with its part.

The balance itself is in the book, which is the same on all workers after the same operation. What a worker measures
goes into the header of the next step and is seen by all; nothing else is.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import msgspec

from paceline.balance import Balance, Minimum, Shares, StepTiming
from paceline.control.machines.member_events import Burden
from paceline.control.messages.plan import Plan
from paceline.strategy.base import Notice
from paceline.strategy.header import HeaderRows
from paceline.train.book import Book


class Sharing:
    """`total` and `minimum` are the global batch and the fewest samples that a worker should take where shares are
    automatic; `tell` gets what a person may want to know. `is_alone`: nobody will ever take a part."""

    def __init__(
        self, total: int, minimum: Minimum, tell: Callable[[str, str], None], *, is_alone: bool = False
    ) -> None:
        self._is_alone = is_alone
        self.watch = Stopwatch()
        self._total, self._minimum = total, minimum
        self._tell = tell
        self._reduced_s = 0.0  # in the last step
        self._posted = Burden("")
        self._digested: tuple[Shares, int] | None = None
        self._known: tuple[Plan, Balance, Shares] | None = None  # what was asked for last

    def shares(self, plan: Plan, book: Book) -> Shares:
        """Of a plan whose members all have this book."""
        known = self._known
        if known is None or known[0] is not plan or known[1] is not book.balance:
            self._known = known = (plan, book.balance, self._shares(plan, book.balance))
        return known[2]

    def _shares(self, plan: Plan, balance: Balance) -> Shares:
        if not plan.is_balanced:
            return Shares(plan.generation, 0, tuple(seat.share for seat in plan.seats))
        seated = balance.seated(plan.seats, self._total, self._fewest(plan))
        return Shares(plan.generation, seated.version, seated.shares)

    def _fewest(self, plan: Plan) -> int:
        return self._minimum.of(self._total, len(plan.seats))

    def rebound(self) -> None:
        """There is another group: the next step says nothing of how long one takes."""
        self.watch.spoil()
        self._reduced_s = 0.0

    def noticed(self, notice: Notice, busy_s: float, plan: Plan, book: Book) -> Notice:
        """What the header of a step says beside the usual."""
        digest = self._digest(self.shares(plan, book))
        return msgspec.structs.replace(notice, shares=digest, busy_s=busy_s, reduced_s=self._reduced_s)

    def _digest(self, shares: Shares) -> int:
        """Workers that divide the batch differently must not go on."""
        if self._digested is None or self._digested[0] != shares:
            digest = hashlib.blake2b(repr(shares.parts).encode(), digest_size=8).digest()
            self._digested = (shares, int.from_bytes(digest, "little") >> 1)
        return self._digested[1]

    def reduced(self, seconds: float) -> None:
        """The reduction of a step is over, and took so long."""
        self.watch.start()
        self._reduced_s = seconds

    def observe(self, plan: Plan, rank: int, book: Book, rows: HeaderRows) -> Burden | None:
        """After a step: what all said of it goes into the book, and with it the shares of the next one. The main worker
        tells what changes; what is returned is for the coordinator to know."""
        if not plan.is_balanced or self._is_alone:
            return None
        before = book.balance.seated(plan.seats, self._total, self._fewest(plan))
        measures = [StepTiming(row.samples, row.busy_s, row.reduced_s, row.limit) for row in rows]
        after = book.balance = before.observed(measures, self._total, self._fewest(plan))
        if rank != 0:
            return None
        if after.version != before.version:
            self._tell("shares", after.reason)
        if (after.burden, plan.generation) == (self._posted.member, self._posted.generation):
            return None
        if after.burden and after.burden != self._posted.member:
            self._tell("burden", f"{after.burden} costs more than it gives: {after.why_burden}")
        self._posted = Burden(after.burden, after.why_burden, plan.generation)
        return self._posted


class Stopwatch:
    """How long a worker is busy from one reduction to the next: the update, the loop body, loading, computing. Waiting
    for others is not; a step during which something else happened is not measured."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._busy_s = 0.0
        self._is_void = True

    def start(self) -> None:
        """A reduction is over: the next step begins."""
        self._since, self._busy_s, self._is_void = time.monotonic(), 0.0, False

    def spoil(self) -> None:
        """What is being measured is no usual step: the first of all, the first with another group, a second attempt."""
        self._is_void = True

    def pause(self) -> None:
        if self._since is not None:
            self._busy_s += time.monotonic() - self._since
            self._since = None

    def resume(self) -> None:
        if self._since is None:
            self._since = time.monotonic()

    def read(self, waited_s: float = 0.0) -> float:
        """Without the time that it waited for others meanwhile; 0 if it was spoilt."""
        if self._is_void or self._since is None:
            return 0.0
        return max(0.0, self._busy_s + time.monotonic() - self._since - waited_s)
