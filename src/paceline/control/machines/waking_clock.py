"""The coordinator's own time: the seconds during which it could have heard somebody.

A process that is stopped, or gets no processor, hears nobody; when it wakes, the others seem to have been silent for as
long, and what they said lies unread in its sockets. So no deadline of the coordinator is measured in seconds of the
clock. It counts the time between two looks at the clock, of which there are ten a second while it is awake, and of a
longer gap no more than `stall_s`. After such a gap it listens for `listen_s` before it judges anybody by what it has
not heard: a member says something twice in that time.

That holds for one long pause as for many short ones, and does not depend on which event comes first after it.
"""

from __future__ import annotations


class WakingClock:
    """`restored` is a coordinator that comes back: before it was there, it could hear nobody."""

    def __init__(self, now: float, *, stall_s: float, listen_s: float, restored: bool = False) -> None:
        self.now = 0.0
        self._looked = now
        self._stall_s, self._listen_s = stall_s, listen_s
        self._listens_from = 0.0 if restored else -listen_s

    def look(self, now: float) -> float:
        """The clock shows this; the coordinator's own time."""
        gap_s = max(0.0, now - self._looked)
        self._looked = max(now, self._looked)
        self.now += min(gap_s, self._stall_s)
        if gap_s > self._stall_s:
            self._listens_from = self.now
        return self.now

    @property
    def has_listened(self) -> bool:
        """Whether it has been awake for long enough that who has not been heard has not spoken."""
        return self.now - self._listens_from >= self._listen_s
