"""A switch that could not be made: when it is known who is to blame, and when the same seats may be tried again.

The first report of a broken switch seldom says why: who reports first may only have seen that others gave up. Whoever
is told of the next plan forgets its complaint of the last one. So the coordinator waits for the answers of all who had
a seat, but no longer than the silence deadline. A plan with the same seats would most likely break in the same way: it
is made after a pause.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.control.machines.roster import MemberRecord
from paceline.control.messages.plan import Plan

PAUSE_S = 2.0  # before the same seats are tried again


class Withdrawals:
    """Of the last switch that broke; nothing of it has to be remembered by the next coordinator."""

    def __init__(self, silence_s: float) -> None:
        self._silence_s = silence_s
        self._pause_s = min(PAUSE_S, silence_s)
        self._generation = 0
        self._members: frozenset[str] = frozenset()
        self._at = 0.0

    def note(self, plan: Plan, now: float) -> None:
        """This switch cannot be made; only the first word of it counts."""
        if plan.generation != self._generation:
            self._generation, self._members, self._at = plan.generation, frozenset(plan.members), now

    def may_go_on(self, current: Plan, seated: Iterable[MemberRecord], now: float) -> bool:
        """Whether the next plan may be made: somebody is gone, or all that have a seat have said what they know."""
        seated = list(seated)
        if any(record.fate is not None for record in seated) or now - self._at > self._silence_s:
            return True
        return all(self._has_answered(current, record) for record in seated)

    def _has_answered(self, current: Plan, record: MemberRecord) -> bool:
        working = record.working
        if not record.connected or working.broken == self._generation:
            return True
        # A newcomer that has formed the group waits there for the state, and will find it broken.
        return current.rank_of(record.member) >= 0 and working.formed >= self._generation

    def is_too_early(self, seated: Iterable[MemberRecord], now: float) -> bool:
        """Whether these are the seats of the switch that broke just now."""
        return now - self._at <= self._pause_s and frozenset(record.member for record in seated) == self._members
