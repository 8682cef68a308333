"""A point in time that a wait may not pass, and the name of the wait, so that its error can say what was waited
for."""

from __future__ import annotations

import time

from paceline.errors import DeadlineExceeded

MAX_SECONDS = 2_000_000  # 23 days; `poll` cannot count further in milliseconds


class Deadline:
    """Counts down from the moment it is made. `operation` reads as in "all_reduce of group g: …"."""

    __slots__ = ("_at", "operation", "seconds")

    def __init__(self, seconds: float, operation: str) -> None:
        if not 0 < seconds <= MAX_SECONDS:
            raise ValueError(
                f"a deadline of {seconds!r} s for {operation} is not positive and finite; "
                f"give a number of seconds > 0 and at most {MAX_SECONDS}"
            )
        self.seconds = seconds
        self.operation = operation
        self._at = time.monotonic() + seconds

    def remaining_s(self) -> float:
        """Seconds left, never below 0."""
        return max(0.0, self._at - time.monotonic())

    def remaining_ms(self) -> int:
        """What `poll` wants; rounded up, so that a wait never ends just before its deadline."""
        return int(self.remaining_s() * 1000) + 1

    def expired(self) -> bool:
        return time.monotonic() >= self._at

    def error(self, waited_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.operation}: waited {self.seconds:g} s for {waited_for}")

    def check(self, waited_for: str) -> None:
        if self.expired():
            raise self.error(waited_for)
