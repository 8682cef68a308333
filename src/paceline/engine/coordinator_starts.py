"""When a coordinator that ended is started again. A part of the `Supervisor` machine, and as pure."""

from __future__ import annotations

from collections import deque

from paceline.control.exit_codes import FULL, exit_words
from paceline.engine.slots import AgentRules


class CoordinatorStarts:
    """At once, but no more than `coordinator_deaths` times in `coordinator_window_s`. Where there was no room on its
    disk, which is no death, after pauses that grow, for no more than `full_s`."""

    def __init__(self, rules: AgentRules) -> None:
        self._rules = rules
        self._deaths: deque[float] = deque()
        self._full_since: float | None = None
        self._num_pauses = 0
        self.due_at: float | None = None  # when the next start is, if one is due
        self.reason = ""  # why there is none any more

    def ended(self, code: int, now: float) -> None:
        """Without a last word on the run."""
        self.due_at, self.reason = now, ""
        if code == FULL:
            self._wait_for_room(now)
            return
        self.worked()
        self._deaths.append(now)
        while self._deaths[0] < now - self._rules.coordinator_window_s:
            self._deaths.popleft()
        if len(self._deaths) > self._rules.coordinator_deaths:
            self._give_up(f"the coordinator ended {len(self._deaths)} times; the last time it {exit_words(code)}")

    def _wait_for_room(self, now: float) -> None:
        if self._full_since is None:
            self._full_since = now
        if now - self._full_since > self._rules.full_s:
            self._give_up("the coordinator cannot work: the disk of the run's folder is full; make room there")
            return
        self.due_at = now + min(self._rules.first_pause_s * 2**self._num_pauses, self._rules.longest_pause_s)
        self._num_pauses += 1

    def _give_up(self, reason: str) -> None:
        self.due_at, self.reason = None, reason

    def worked(self) -> None:
        """It was heard of, or ended of something else than a full disk."""
        self._full_since, self._num_pauses = None, 0

    @property
    def is_first_pause(self) -> bool:
        return self._num_pauses == 1
