"""This worker's side of the shares: how a batch is divided now, and how long this worker was busy with its part.

The balance itself is in the book, which is the same on all workers after the same operation. What a worker measures
goes into the header of the next step and is seen by all; nothing else is.
"""

from __future__ import annotations

import hashlib
import time

from paceline.balance import Measure, Shares
from paceline.control.messages import Plan
from paceline.strategy.header import Rows
from paceline.train.book import Book


class Sharing:
    """`total` and `minimum` are the global batch and the fewest samples that a worker can take."""

    def __init__(self, total: int, minimum: int) -> None:
        self._total, self._minimum = total, minimum
        self._digested: tuple[Shares, int] | None = None

    def shares(self, plan: Plan, book: Book) -> Shares:
        """Of a plan whose members all have this book."""
        if not plan.is_balanced:
            return Shares(plan.generation, 0, tuple(seat.share for seat in plan.seats))
        balance = book.balance.seated(plan.seats, self._total, self._minimum)
        return Shares(plan.generation, balance.version, balance.shares)

    def digest(self, shares: Shares) -> int:
        """For the header: workers that divide the batch differently must not go on."""
        if self._digested is None or self._digested[0] != shares:
            digest = hashlib.blake2b(repr(shares.parts).encode(), digest_size=8).digest()
            self._digested = (shares, int.from_bytes(digest, "little") >> 1)
        return self._digested[1]

    def observe(self, plan: Plan, book: Book, rows: Rows) -> str:
        """After a step: what all said of it goes into the book. Why the shares change, or "" if they do not."""
        if not plan.is_balanced:
            return ""
        before = book.balance.seated(plan.seats, self._total, self._minimum)
        measures = [Measure(row.samples, row.busy_s, row.reduced_s, row.limit) for row in rows]
        book.balance = before.observed(measures, self._total, self._minimum)
        return book.balance.reason if book.balance.version != before.version else ""


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

    def read(self) -> float:
        """0 if it was spoilt."""
        if self._is_void or self._since is None:
            return 0.0
        return self._busy_s + time.monotonic() - self._since
