"""The coordinator's machine: the roster, the plans, who lives, and when the run is over.

Events: reports of members and agents, lost connections, wishes of people (`Drain`, `Halt`), and `Tick`. Actions: what
to tell whom, what to remember before that (`Remember` comes first in the list, and must be on disk before anything
after it is sent), what to write into the run's log.

It stands in one of four states, which follow from what it remembers:

    gathering   no plan: waits until enough members are ready, then founds the run (new, or from a checkpoint)
    running     a plan is in force; at most one switch is outstanding
    fencing     the fence is above every plan: waits until all that live have promised, then recovers
    over        ended, stopped or failed: releases everybody

Invariants
- A generation is used for one plan; it is remembered before anybody hears of it.
- A plan after a loss is made only when every living member of the older ones has promised to apply nothing more there.
- Its base is the highest operation that one of them has applied; all of its members are there or one behind.
- A member that is dead, evicted or refused never comes back; its id is never used again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import assert_never

from paceline.control.leases.messages import LeaseReport, row_of, rows_of_begun
from paceline.control.machines.agents import Starting
from paceline.control.machines.coordinator_events import (
    Action,
    AdoptLeases,
    Connected,
    CoordinatorState,
    Count,
    Disconnected,
    Drain,
    Event,
    Halt,
    Remember,
    RunOver,
    RunSettings,
    TellLeases,
    Tick,
)
from paceline.control.machines.directives import DirectiveWriter, plan_of
from paceline.control.machines.failure_detector import FailureDetector
from paceline.control.machines.fit import check_fit
from paceline.control.machines.founding import GONE_ON, Founding, holds
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.planner import Planner
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.machines.waking_clock import WakingClock
from paceline.control.messages.agents import AgentReport
from paceline.control.messages.members import Report
from paceline.control.messages.plan import NOTHING, Phase, Plan
from paceline.placement.placement import Placement


class Coordinator:
    memory_type, planner_type, founding_type = CoordinatorMemory, Planner, Founding  # a simulator puts others there

    def __init__(
        self,
        settings: RunSettings,
        now: float,
        remembered: Mapping[str, bytes] | None = None,
        host: str = "",
        *,
        is_again: bool = False,
        born: int = 0,
    ) -> None:
        """`host` is where this coordinator runs, as cards name it; `is_again` if another one was there before it, also
        where nothing is remembered of that. `born` is above that of every earlier one: the seconds of the calendar."""
        self.settings = settings
        remembered = remembered or {}
        self._clock = WakingClock(now, stall_s=settings.stall_s, listen_s=settings.listen_s, restored=bool(remembered))
        # Numbers that an earlier one has used, and that are forgotten, must not come again: some may still go by them.
        used = born if is_again and "standing" not in remembered else 0
        self._memory = memory = self.memory_type(settings, remembered, self._clock.now, used)
        self.census, self.records = memory.census, memory.census.records
        self._detector = FailureDetector(settings, memory.census, memory.agents, self._clock)
        self._planner = self.planner_type(memory, host)
        self._founding = self.founding_type(memory, self._planner, is_again=is_again)
        self._speech = DirectiveWriter()
        self._announced = False
        self._adopted = 0  # the last founding of which it is known which leases it began with
        memory.keep(term=memory.standing.term + 1)

    # -- the shell's side --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        return self.handle_all([event], now)

    def handle_all(self, events: Sequence[Event], now: float) -> list[Action]:
        """Several events at once cost one decision."""
        self._memory.now = self._clock.look(now)  # before anything is judged: if this one stood still, others did not
        relevant = [self._take(event) for event in events]
        if any(relevant):
            self._decide()
            self._tell_all()
        for event in events:
            self._answer(event)
        self._grant([event.member for event in events if isinstance(event, LeaseReport)])
        return self.take_actions()

    def take_actions(self) -> list[Action]:
        """What is to be remembered comes before what is said; both keep their order."""
        actions, self._memory.actions = self._memory.actions, []
        return sorted(actions, key=lambda action: not isinstance(action, Remember))

    @property
    def standing(self) -> CoordinatorState:
        return self._memory.standing

    @property
    def placement(self) -> Placement:
        return self._memory.manager.placement

    def plan_of(self, member: str) -> Plan | None:
        return plan_of(member, self.standing)

    def starting(self) -> list[Starting]:
        """Processes of agents that have not joined yet; for people."""
        return self._memory.agents.starting(self.records.values())

    # -- events ------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> bool:
        """Whether there may be something to decide after it."""
        match event:
            case Report():
                return self._on_report(event)
            case LeaseReport():
                self._on_lease_report(event)
                return False
            case AgentReport():
                return self._memory.agents.take(event, self._memory.now)
            case Connected():
                if (record := self.records.get(event.member)) is not None:
                    record.connected = True
                    record.heard = self._memory.now
                return False
            case Disconnected():
                if (record := self._living(event.member)) is not None:
                    record.connected = False
                return record is not None
            case Drain():
                if (record := self._living(event.member)) is not None:
                    self._memory.drain(record, "was asked to leave")
                return record is not None
            case Halt():
                self._memory.halt(event.reason)
                return True
            case Tick():
                self._memory.keep_leases()
                return True
            case _:
                assert_never(event)

    def _living(self, member: str) -> MemberRecord | None:
        record = self.records.get(member)
        return record if record is not None and record.fate is None else None

    def _on_report(self, report: Report) -> bool:
        record = self.records.get(report.member)
        self._founding.hear(report, record)
        if record is None:
            if report.introduction is None:
                return False
            record = self._introduce(report)
        if record.fate is not None or report.number <= record.number:
            return bool(self.standing.over)  # by what it differs in, perhaps
        record.heard = self._memory.now
        record.connected = True
        return record.take(report)

    def _introduce(self, report: Report) -> MemberRecord:
        assert report.introduction is not None
        memory, who = self._memory, report.introduction
        record = self.records[report.member] = MemberRecord(who, memory.now)
        check_fit(record, memory)
        memory.save(record)
        if memory.manager.hear(report.held):
            memory.remember("held", report.held)
        memory.note("joined", record, f"process {who.pid} on {who.host}")
        if record.is_server and self.standing.current is not None:
            self._founding.warn_of_unused()
        return record

    def _on_lease_report(self, report: LeaseReport) -> None:
        if (record := self._living(report.member)) is None:
            return
        record.heard = self._memory.now
        dispatcher, standing = self._memory.dispatcher, self.standing
        news = dispatcher.take(report)
        generation = standing.current.generation if standing.current is not None else 0
        if self._adopted < standing.founded and report.begun.epoch == dispatcher.epoch and len(report.begun):
            self._adopted = standing.founded
            self._memory.actions.append(AdoptLeases(rows_of_begun(report, generation)))
        if news:
            self._memory.actions.append(Count(tuple(row_of(report, one, generation) for one in news)))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        for loss in self._detector.losses(self.standing):
            self._memory.end(loss.record, loss.fate, loss.reason)
        if not self.standing.over:
            self._arrange()
            self._planner.watch_progress()
            self._advance()
        if self.standing.over:
            self._release_all()

    def _advance(self) -> None:
        """From the state that the run stands in, to the next if it is time."""
        if self.census.is_troubled(self.standing) and self.standing.fence <= self.standing.newest:
            self._memory.keep(fence=self.standing.newest + 1)
        if self.standing.fence > self.standing.newest and self.standing.current is not None:
            self._planner.recover(self.standing.current)
        if self.standing.over:
            return
        if self.standing.current is None:
            self._release_idle()
            self._founding.gather()
        elif self.standing.fence <= self.standing.newest:
            self._run(self.standing.current)

    def _arrange(self) -> None:
        """Where the ranges go, now that servers came, went or did what they were told."""
        memory = self._memory
        change = memory.manager.update(self.census.servers, self.standing.ranges)
        if change is not None:
            memory.place(change)
        memory.keep_aim()
        for record in self.census.servers:
            if record.is_going and not memory.manager.holds(record.member):
                memory.end(record, Fate.RELEASED, "left the run")

    def _run(self, current: Plan) -> None:
        """A plan is in force: see the end, or prepare the next one."""
        at_work = self.census.at_work(current, self.standing.pending)
        if all(record.fate is not None or record.report.phase is Phase.ENDED for record in at_work):
            self._memory.keep(over="ended", reason=self.standing.halting or "all members reached the end")
            return
        self._release_idle()
        self._planner.change(current)

    # -- letting go --------------------------------------------------------------------------------------------------

    def _release_idle(self) -> None:
        """Let go who has left, and who wants to go and has no seat."""
        current = self.standing.current
        for record in self.census.alive:
            has_state = record.working.applied > NOTHING
            if self.plan_of(record.member) is None and ((has_state and current is not None) or record.is_going):
                is_holder = holds(record.report)
                if is_holder and current is None and not self.standing.founded:
                    continue  # the journal is lost, and the run goes on from it first
                if is_holder and current is not None and not record.is_going:
                    late = f"it came with operation {record.working.applied} when {GONE_ON}"
                    self._memory.end(record, Fate.EVICTED, late)  # it comes back as another
                    continue
                self._memory.end(record, Fate.RELEASED, "left the run")

    def _release_all(self) -> None:
        for record in [*self.census.alive, *self.census.servers]:
            self._memory.end(record, Fate.RELEASED, self.standing.reason)
        if not self._announced:
            self._announced = True
            self._memory.actions.append(RunOver(self.standing.over == "failed", self.standing.reason))

    # -- saying ------------------------------------------------------------------------------------------------------

    def _tell_all(self) -> None:
        for record in self.records.values():
            if record.connected:
                self._tell_member(record, asked=False)
        for agent in self._memory.agents:
            self._tell_agent(agent, asked=False)

    def _answer(self, event: Event) -> None:
        """Who spoke is answered, so that it knows that it was heard."""
        if isinstance(event, AgentReport):
            self._tell_agent(event.agent, asked=True)
        elif isinstance(event, Report) and event.member in self.records:
            self._tell_member(self.records[event.member], asked=True)
        elif isinstance(event, Report):
            self._memory.actions.append(self._speech.to_stranger(event.member, self.standing))

    def _tell_member(self, record: MemberRecord, *, asked: bool) -> None:
        self._memory.actions += self._speech.to_member(record, self.standing, self.placement, asked=asked)

    def _tell_agent(self, agent: str, *, asked: bool) -> None:
        agents, records = self._memory.agents, self.records.values()
        self._memory.actions += self._speech.to_agent(agent, agents, records, self.standing, asked=asked)

    def _grant(self, asked: Sequence[str]) -> None:
        grants = self._memory.dispatcher.grants(self.standing.term, asked)
        if any(grant.is_finished for grant in grants):
            self._memory.keep_leases()  # a coordinator that comes back must not say anything else
        self._memory.actions += [TellLeases(grant) for grant in grants]
