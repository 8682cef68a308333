"""Who is dead, and who is as good as dead.

A member is *dead* when its process is known to have ended: its agent says so, another member on its host saw it, or its
connections broke both here and to another member. It is *failed* when it said so itself. It is *evicted* when nothing
was heard of it for too long: longer, if its agent says that its process computes, and longer still, if nobody at all is
heard, because then most likely the network here is at fault and the others go on without a coordinator.

Times are the coordinator's own (`waking.py`). What follows from not hearing somebody, or from a lost connection, is
judged only when the coordinator has listened for a while: one that stood still, or has just come back, has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from paceline.control.machines.agents import Agents
from paceline.control.machines.census import Census
from paceline.control.machines.coordinator_events import CoordinatorState, RunSettings
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.machines.waking_clock import WakingClock
from paceline.control.messages.plan import Phase


class Loss(NamedTuple):
    record: MemberRecord
    fate: Fate
    reason: str


class FailureDetector:
    def __init__(self, settings: RunSettings, census: Census, agents: Agents, clock: WakingClock) -> None:
        self._settings = settings
        self._census = census
        self._agents = agents
        self._clock = clock

    def losses(self, standing: CoordinatorState) -> Iterator[Loss]:
        """One after the other: the caller ends each before it asks for the next, for which that one is no witness."""
        now = self._clock.now
        generation = standing.current.generation if standing.current is not None else 0
        for record in [*self._census.alive, *self._census.servers]:
            if (loss := self._death_of(record, generation)) is not None:
                yield loss
        for record in self._silent(standing, now):
            yield Loss(record, Fate.EVICTED, f"was not heard of for {now - record.heard:.1f} s")

    def _death_of(self, record: MemberRecord, generation: int) -> Loss | None:
        exited = self._agents.exit_of(record)
        others = [other.report for other in self._census.alive if other is not record]
        process = f"process {record.introduction.pid}"
        if record.report.phase is Phase.FAILED:
            return Loss(record, Fate.FAILED, record.report.cause)
        if exited is not None:
            return Loss(record, Fate.DEAD, f"{process} {exited}")
        if any(record.member in other.working.dead for other in others):
            return Loss(record, Fate.DEAD, f"{process} ended, as another on its host saw")
        # What broke before the plan in force is past and forgiven.
        suspects = [other.working.suspects for other in others if other.working.broken >= generation]
        is_lost = not record.connected and self._clock.has_listened
        if is_lost and any(record.member in names for names in suspects):
            return Loss(record, Fate.DEAD, "its connections broke, here and to another member")
        return None

    def _silent(self, standing: CoordinatorState, now: float) -> list[MemberRecord]:
        found = [record for record in [*self._census.alive, *self._census.servers] if self._is_silent(record, now)]
        everybody = [*self._census.participants(standing), *self._census.servers]
        if everybody and all(record in found for record in everybody):
            return [record for record in found if now - record.heard > self._settings.all_silent_s]
        return found

    def _is_silent(self, record: MemberRecord, now: float) -> bool:
        silence_s = now - record.heard
        if silence_s > self._settings.stuck_s:
            return True
        if silence_s <= self._settings.silence_s or not self._clock.has_listened:
            return False
        return not self._agents.is_busy(record, now - self._settings.silence_s)
