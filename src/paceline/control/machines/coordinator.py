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

from collections.abc import Iterable, Mapping, Sequence
from typing import assert_never

import msgspec

from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.leases.messages import LeaseReport, row_of, rows_of_begun
from paceline.control.machines import founding
from paceline.control.machines.agents import Agents, Starting
from paceline.control.machines.census import Census
from paceline.control.machines.conflicts import Conflicts
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
    Note,
    Remember,
    RunOver,
    RunSettings,
    TellLeases,
    Tick,
)
from paceline.control.machines.directives import DirectiveWriter, plan_of
from paceline.control.machines.failure_detector import FailureDetector
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.machines.seating import gifts_for, seats_for
from paceline.control.machines.server_manager import Aim, Change, ServerManager, idle_in, say_idle
from paceline.control.machines.surveys import UNREACHABLE, Surveys
from paceline.control.machines.waking_clock import WakingClock
from paceline.control.machines.withdrawals import Withdrawals
from paceline.control.messages.agents import AgentReport
from paceline.control.messages.members import Report
from paceline.control.messages.plan import NOTHING, Phase, Plan, PlanStart, Seat
from paceline.placement.placement import Placement
from paceline.wire.decoding import decode


class Coordinator:
    manager_type, desk_type = ServerManager, LeaseDispatcher  # a simulator puts others in their place

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
        self._is_again = is_again
        self.census = Census()
        self.records = self.census.records
        self._agents = Agents()
        self._clock = WakingClock(now, stall_s=settings.stall_s, listen_s=settings.listen_s, restored=bool(remembered))
        self._now = self._born = self._clock.now  # seconds that it was awake, not those of the clock
        self._vitals = FailureDetector(settings, self.census, self._agents, self._clock)
        self._conflicts = Conflicts()
        self._surveys = Surveys(settings.silence_s, host)
        self._withdrawals = Withdrawals(settings.silence_s)
        self._speech = DirectiveWriter()
        self._ready_since: float | None = None
        self._actions: list[Action] = []
        self._announced = False
        self._has_forgotten = False
        self._has_warned = False  # of servers that are not used
        self._adopted = 0  # the last founding of which it is known which leases it began with
        # Numbers that an earlier one has used, and that are forgotten, must not come again: some may still go by them.
        used = born if is_again and "standing" not in (remembered or {}) else 0
        standing, leases = CoordinatorState(term=used, newest=used), (-1, 0)
        placement, held, aim = Placement(), Placement(), Aim()
        for key, value in (remembered or {}).items():
            if key == "standing":
                standing = decode(value, CoordinatorState)
            elif key == "placement":
                placement = decode(value, Placement)
            elif key == "held":
                held = decode(value, Placement)
            elif key == "aim":
                aim = decode(value, Aim)
            elif key == "leases":
                leases = decode(value, tuple[int, int])
            elif key.startswith("member/"):
                record = MemberRecord.restore(value, self._now)
                self.records[record.member] = record
        if not placement.version:
            placement = Placement(version=standing.newest)  # which is remembered: the next one begins there too
        self.standing = standing
        self._manager = self.manager_type(settings.replicas, placement, aim, held, by_load=settings.by_load)
        self._kept_aim = aim
        self._dispatcher = self.desk_type(leases)
        if standing.halting:
            self._dispatcher.stop_again(standing.whole)
        self._keep(term=standing.term + 1)
        self._first_actions = self._actions

    # -- the shell's side --------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Action]:
        return self.handle_all([event], now)

    def handle_all(self, events: Sequence[Event], now: float) -> list[Action]:
        """Several events at once cost one decision."""
        self._actions, self._first_actions = self._first_actions, []
        self._now = self._clock.look(now)  # before anything is judged: if this process stood still, others did not
        relevant = [self._take(event) for event in events]
        if any(relevant):
            self._decide()
            self._tell_all()
        for event in events:
            self._answer(event)
        self._grant([event.member for event in events if isinstance(event, LeaseReport)])
        # What is to be remembered comes before what is said; both keep their order.
        return sorted(self._actions, key=lambda action: not isinstance(action, Remember))

    @property
    def placement(self) -> Placement:
        return self._manager.placement

    def plan_of(self, member: str) -> Plan | None:
        return plan_of(member, self.standing)

    # -- events ------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> bool:
        """Whether there may be something to decide after it."""
        match event:
            case Report():
                return self._on_report(event)
            case LeaseReport():
                return self._on_lease_report(event)
            case AgentReport():
                return self._on_agent_report(event)
            case Connected():
                return self._on_connected(event)
            case Disconnected():
                return self._on_disconnected(event)
            case Drain():
                return self._on_drain(event)
            case Halt():
                return self._on_halt(event)
            case Tick():
                return self._on_tick()
            case _:
                assert_never(event)

    def _on_report(self, report: Report) -> bool:
        record = self.records.get(report.member)
        if (lost := founding.forgotten(report, self.standing, is_known=record is not None)) is not None:
            if not self._has_forgotten:
                what = f"member {report.member} knows of generation {report.plan}; the journal is lost"
                self._note("forgotten", record, what)
            self._has_forgotten = True
            self._keep(term=lost.term, newest=lost.newest)
        if record is None:
            if report.introduction is None:
                return False
            record = self.records[report.member] = MemberRecord(report.introduction, self._now)
            self._check_fit(record)
            self._save(record)
            if self._manager.hear(report.held):
                self._actions.append(Remember("held", msgspec.msgpack.encode(report.held)))
            self._note("joined", record, f"process {record.introduction.pid} on {record.introduction.host}")
            if record.is_server and self.standing.current is not None:
                self._warn_of_unused()
        if record.fate is not None or report.number <= record.number:
            return bool(self.standing.over)  # by what it differs in, perhaps
        record.heard = self._now
        record.connected = True
        return record.take(report)

    def _on_lease_report(self, report: LeaseReport) -> bool:
        record = self.records.get(report.member)
        if record is None or record.fate is not None:
            return False
        record.heard = self._now
        news = self._dispatcher.take(report)
        generation = self.standing.current.generation if self.standing.current is not None else 0
        if self._adopted < self.standing.founded and report.begun.epoch == self._dispatcher.epoch and len(report.begun):
            self._adopted = self.standing.founded
            self._actions.append(AdoptLeases(rows_of_begun(report, generation)))
        if news:
            self._actions.append(Count(tuple(row_of(report, one, generation) for one in news)))
        return False

    def _on_agent_report(self, report: AgentReport) -> bool:
        return self._agents.take(report, self._now)

    def _on_connected(self, event: Connected) -> bool:
        if (record := self.records.get(event.member)) is not None:
            record.connected = True
            record.heard = self._now
        return False

    def _on_disconnected(self, event: Disconnected) -> bool:
        record = self.records.get(event.member)
        if record is None or record.fate is not None:
            return False
        record.connected = False
        return True

    def _on_drain(self, event: Drain) -> bool:
        record = self.records.get(event.member)
        if record is None or record.fate is not None:
            return False
        record.draining = True
        self._save(record)
        self._note("draining", record, "was asked to leave")
        return True

    def _on_halt(self, event: Halt) -> bool:
        if not self.standing.halting and not self.standing.over:
            self._wind_down(event.reason)
            self._note("halting", None, event.reason)
        return True

    def _wind_down(self, reason: str) -> None:
        """No more leases; a coordinator that comes back after this one says the same of the epoch that it ends in."""
        self._dispatcher.stop()
        self._keep(halting=reason, whole=self._dispatcher.whole)
        self._keep_leases()

    def _on_tick(self) -> bool:
        self._keep_leases()
        return True

    def _keep_leases(self) -> None:
        if (reached := self._dispatcher.to_remember()) is not None:
            self._dispatcher.remembered = reached
            self._actions.append(Remember("leases", msgspec.msgpack.encode(reached)))

    # -- deciding ----------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        for loss in self._vitals.losses(self.standing):
            self._end(loss.record, loss.fate, loss.reason)
        if self.standing.over:
            self._release_all()
            return
        self._arrange()
        self._watch_progress()
        if self.census.is_troubled(self.standing) and self.standing.fence <= self.standing.newest:
            self._keep(fence=self.standing.newest + 1)
        if self.standing.fence > self.standing.newest and self.standing.current is not None:
            self._recover()
        if self.standing.over:
            self._release_all()
        elif self.standing.current is None:
            self._gather()
        elif self.standing.fence <= self.standing.newest:
            self._run()

    def _end(self, record: MemberRecord, fate: Fate, reason: str) -> None:
        record.fate = fate
        record.reason = reason
        self._dispatcher.bury(record.member)
        self._save(record)
        self._note(fate.value, record, reason)

    def _arrange(self) -> None:
        """Where the ranges go, now that servers came, went or did what they were told."""
        change = self._manager.update(self.census.servers, self.standing.ranges)
        if change is not None:
            self._place(change)
        self._keep_aim()
        for record in self.census.servers:
            if record.is_going and not self._manager.holds(record.member):
                self._end(record, Fate.RELEASED, "left the run")

    def _place(self, change: Change) -> None:
        self._actions.append(Remember("placement", msgspec.msgpack.encode(change.placement)))
        if change.lost:
            text = f"{len(change.lost)} of {len(change.placement.ranges)} ranges: no server that lives has them"
            self._note("lost ranges", None, text)

    def _keep_aim(self) -> None:
        if self._manager.aim is not self._kept_aim:
            for server in sorted(idle_in(self._manager.aim) - idle_in(self._kept_aim)):
                self._note("warning", None, say_idle(server, self._manager.aim))
            self._kept_aim = self._manager.aim
            self._actions.append(Remember("aim", msgspec.msgpack.encode(self._kept_aim)))
        for text in self._manager.take_news():
            self._note("hot server", None, text)

    def _watch_progress(self) -> None:
        pending, current = self.standing.pending, self.standing.current
        if pending is not None and self.census.all_work_in(pending):
            self._keep(current=pending, pending=None)
            return
        if pending is None and (current is None or not self.census.outside(current)):
            return
        plan = pending or current
        if plan is not None and self.census.any_has_fallen(plan):
            self._withdrawals.note(plan, self._now)

    def _recover(self) -> None:
        """Make the next plan as soon as everybody that lives has promised to leave the old ones alone."""
        current = self.standing.current
        assert current is not None
        fence = self.standing.fence
        survivors = self.census.participants(self.standing)
        if any(record.report.fenced < fence for record in survivors):
            return
        self._blame(current, self.census.outside(current))
        holders = [record for record in survivors if record.report.applied > NOTHING]
        if self.standing.leased and any(not record.is_going for record in holders):
            holders = [record for record in holders if not record.is_going]  # they go when their lease is done
        if all(record.report.left for record in holders):
            holders = []  # those whom they left may have gone on, and have said so to nobody that lives
        if not holders:
            if all(record.fate is Fate.FAILED for record in self.census.of(current)):
                self.fail(self._root_cause())  # it would fail again
                return
            self._keep(current=None, pending=None, reached=max(self.census.reached(), self.standing.reached))
            self._note("lost", None, "nobody that lives holds the training state; the newest checkpoint has it")
            return
        leaving = self._surveys.parted(holders, current.generation, fence, self.standing.term, self._now)
        if leaving is None:
            return  # members find out whom they can reach
        if leaving:
            holders = self._part(holders, leaving)
        elif (culprit := self._conflicts.worst_of(holders, current.generation)) is not None:
            self._end(culprit, Fate.EVICTED, UNREACHABLE)
            holders.remove(culprit)
        base = max(record.report.applied for record in holders)
        for record in [record for record in holders if record.report.applied < base - 1]:
            self._end(record, Fate.RELEASED, "it had left when the others went on")
            holders.remove(record)
        ahead = [record for record in holders if record.report.applied == base]
        gifts = gifts_for([record for record in holders if record.report.applied == base - 1], ahead)
        coming = self._coming(current, holders) if self.standing.leased else []
        if self._withdrawals.is_too_early([*holders, *coming], self._now):
            coming = []
        gifts |= gifts_for(coming, ahead)
        newcomers = tuple(record.member for record in coming)
        self._issue(Plan(fence, PlanStart.RECOVER, self._seats([*holders, *coming]), base, gifts, newcomers))

    def _part(self, holders: list[MemberRecord], leaving: list[MemberRecord]) -> list[MemberRecord]:
        """Some cannot reach each other: go on without these. Too few are left only to save what they have."""
        for record in leaving:
            self._end(record, Fate.EVICTED, f"{UNREACHABLE}, and more workers can go on without it")
        holders = [record for record in holders if record not in leaving]
        if len(holders) < self.settings.fewest and not self.standing.halting:
            reason = f"hosts cannot reach each other, and only {len(holders)} workers can go on (--min)"
            self._on_halt(Halt(reason))
        return holders

    def _coming(self, current: Plan, members: list[MemberRecord]) -> list[MemberRecord]:
        """Who gets a seat beside these members, or in place of those that leave."""
        if not self._is_open(members):
            return []
        staying = [record for record in members if not record.is_going]
        coming = self._surveys.admitted(
            self.census.coming(current), staying, self.records.values(), self.standing.term, self._now
        )
        return coming[: max(0, self.settings.most - len(staying))]

    def _is_open(self, members: list[MemberRecord]) -> bool:
        """Whether others may join these now: where leases are done, not between the operations of an epoch's end."""
        return not self.standing.leased or all(record.report.joinable for record in members)

    def starting(self) -> list[Starting]:
        """Processes of agents that have not joined yet; for people."""
        return self._agents.starting(self.records.values())

    def _gather(self) -> None:
        """Found the run when enough members are ready."""
        ready = self.census.ready()
        self._release_idle()
        if holders := founding.holders(self.census.alive):
            self._adopt_holders(holders)
            return
        if self.standing.halting:
            self._keep(over="ended", reason=self.standing.halting)
            self._release_all()
            return
        if not ready:
            self._ready_since = None
            if not self.census.alive and self._agents.are_spent():
                self.fail(self._root_cause())
                self._release_all()
            return
        if self._ready_since is None:
            self._ready_since = self._now
        waited_s = self._now - self._ready_since
        if len(ready) < self.settings.fewest:
            return
        may_wait = waited_s < self.settings.grace_s and self._agents.may_bring_more(len(ready))
        if len(ready) < self.settings.wanted and may_wait and not founding.has_survivor(ready):
            return
        if self.standing.ranges and not self._has_enough_servers(waited_s):
            return
        if not self.standing.founded and self._may_have_forgotten():
            return
        self._ready_since = None
        ready = sorted(ready, key=lambda record: -record.report.checkpoint)[: self.settings.most]
        founder, *others = ready
        base = max(founder.report.checkpoint, 0)
        generation = max(self.standing.newest, self.standing.fence - 1) + 1
        if self.standing.founded:
            if self.standing.reached > base:
                self._note("rollback", founder, f"operations {base + 1} to {self.standing.reached} are done again")
            else:
                self._note("resumed", founder, f"goes on after operation {base}")
        plan = Plan(generation, PlanStart.FOUND, self._seats(ready), base, gifts_for(others, [founder]))
        self._keep(founded=self.standing.founded + 1, fence=generation, reached=base)
        self._dispatcher.forget()
        self._actions.append(Remember("leases", None))
        if self.settings.servers or self.census.servers:
            self._warn_of_unused()
        if self.standing.ranges:
            self._place(self._manager.found(generation, self.census.ready_servers(), self.standing.ranges))
            self._keep_aim()
        self._issue(plan)

    def _warn_of_unused(self) -> None:
        """There are servers, and workers that may have no use for them."""
        if not self.standing.ranges and not self._has_warned:
            self._has_warned = True
            self._note("warning", None, founding.unused_servers(self.standing.facts or {}))

    def _may_have_forgotten(self) -> bool:
        """A coordinator that knows of no founding may be one whose journal is lost: it hears everybody first who could
        hold the state. On which hosts they are is forgotten too, so all of them get time to come."""
        age_s, records = self._now - self._born, self.records.values()
        if self._is_again and age_s < self.settings.listen_s:
            return True
        if not self._agents.have_come(records):
            return age_s < self.settings.listen_s
        return age_s < self.settings.silence_s and self._agents.see_unknown(records)

    def _adopt_holders(self, holders: list[MemberRecord]) -> None:
        """The journal is lost, and members that live hold the state: the run goes on from the newest of them."""
        held = self._manager.held
        age_s = self._now - self._born
        awaits_servers = age_s < self.settings.silence_s and not held.card_of.keys() <= self.records.keys()
        if self._may_have_forgotten() or awaits_servers:
            return
        self._ready_since = None
        servers, known = self.census.servers, self.census.known_placement()
        change = self._manager.adopt(servers, self.standing.ranges, known)
        if self.standing.ranges and change is not None:
            self._place(change)
        elif self.standing.ranges:
            self.fail(
                "the run's database is lost, and with it which server holds what, or no server that lives has some of "
                "it; resume from the newest checkpoint"
            )
            self._release_all()
            return
        newest = max(record.report.applied for record in holders)
        self._note("adopted", None, f"{len(holders)} members hold the state, up to operation {newest}")
        last = max(record.report.plan for record in holders)
        plan = Plan(last, PlanStart.RECOVER, self._seats(holders), newest)
        founded = max(1, self.standing.founded)
        self._keep(current=plan, fence=self.standing.newest + 1, founded=founded, reached=newest)
        self._recover()

    def _has_enough_servers(self, waited_s: float) -> bool:
        """Whether the run can be founded with the servers that are there."""
        num_ready = len(self.census.ready_servers())
        if not self.census.servers and not self.settings.servers:
            self.fail("the strategy of this script keeps parameters on servers, and there are none: give --servers 1")
            self._release_all()
            return False
        fewest = max(1, self.settings.replicas)
        return num_ready >= max(self.settings.servers, 1) or (num_ready >= fewest and waited_s > self.settings.grace_s)

    def _run(self) -> None:
        """A plan is in force: prepare the next one if somebody comes or goes, see the end."""
        current = self.standing.current
        assert current is not None
        pending = self.standing.pending
        at_work = self.census.at_work(current, pending)
        if all(record.fate is not None or record.report.phase is Phase.ENDED for record in at_work):
            self._keep(over="ended", reason=self.standing.halting or "all members reached the end")
            self._release_all()
            return
        self._release_idle()
        if pending is not None:
            if not self.census.any_has_fallen(pending):
                return
            self._blame(pending, [record for record in self.census.of(pending) if current.rank_of(record.member) < 0])
            if not self._withdrawals.may_go_on(current, self.census.of(pending), self._now):
                return
        elif not self.census.all_work_in(current):
            return
        if self.settings.drop_stragglers:
            self._drop_straggler(current)
        self._change(current, withdrawn=pending is not None)

    def _blame(self, plan: Plan, newcomers: Sequence[MemberRecord]) -> None:
        """The group of a plan cannot be formed. A newcomer that lives but cannot be reached goes; one that complains of
        a member goes when it does so of the next plan too. Whoever is dying is found out anyway, and nobody is to blame
        for that. While answers are waited for, this is looked at again and again."""
        for record in self.census.of(plan):
            if record.fate is not None or record.report.broken != plan.generation:
                continue
            for name in record.report.suspects:
                suspect = self.records.get(name)
                if suspect is None or suspect.fate is not None or not suspect.connected:
                    continue
                if suspect in newcomers:
                    self._end(suspect, Fate.EVICTED, f"{UNREACHABLE}: member {record.member} cannot")
                elif record in newcomers and self._conflicts.are_repeated_in(plan.generation, record.member, name):
                    self._end(record, Fate.EVICTED, f"{UNREACHABLE}: it cannot reach member {name}")

    def _drop_straggler(self, current: Plan) -> None:
        """One at a time, on the main member's word: what the next one costs is seen when this one is gone."""
        staying = self.census.staying(current)
        if len(staying) < len(current.members) or len(staying) <= self.settings.fewest:
            return
        report = self.records[current.members[0]].report
        if report.burden_in == current.generation and current.rank_of(report.burden) >= 0:
            record = self.records[report.burden]
            record.draining = True
            self._save(record)
            self._note("draining", record, f"costs more than it gives: {report.why_burden}")

    def _change(self, current: Plan, *, withdrawn: bool) -> None:
        """The next plan, if it would be another one than the present."""
        if any(record.report.phase is Phase.ENDED for record in self.census.of(current)):
            if withdrawn:
                self._keep(pending=None)
            return
        staying = self.census.staying(current)
        coming = self._coming(current, staying or self.census.of(current))
        if not staying and coming and not self.standing.halting:
            staying = self.census.of(current)  # they hand over first, and go with the next
        if not staying and not self.standing.halting:
            if self.census.coming(current) and not self._is_open(self.census.of(current)):
                return  # they hand over when they are at leases again
            self._wind_down("all members were asked to leave")
        if not staying or (len(staying) == len(current.members) and not coming):
            if withdrawn:
                self._keep(pending=None)
            return
        if self._withdrawals.is_too_early([*staying, *coming], self._now):
            if withdrawn:
                self._keep(pending=None)
            return
        if self.standing.leased:  # where there is no step, there is no header to agree on a switch in
            self._keep(fence=self.standing.newest + 1)
            self._recover()
            return
        gifts = gifts_for(coming, staying)
        generation = self.standing.newest + 1
        self._issue(Plan(generation, PlanStart.SWITCH, self._seats([*staying, *coming]), NOTHING, gifts))

    def _issue(self, plan: Plan) -> None:
        if plan.start is PlanStart.SWITCH:
            self._keep(newest=plan.generation, pending=plan)
        else:
            self._keep(newest=plan.generation, current=plan, pending=None)
        self._note("plan", None, f"generation {plan.generation} ({plan.start.value}): {', '.join(plan.members)}")

    def _seats(self, records: Iterable[MemberRecord]) -> tuple[Seat, ...]:
        return seats_for(records, self.standing.pending or self.standing.current, self.settings.shares)

    # -- fit ---------------------------------------------------------------------------------------------------------

    def _check_fit(self, record: MemberRecord) -> None:
        """A member whose model, data or versions differ from the run's would spoil it."""
        if record.is_server:
            difference = founding.difference_of_server(self.standing.facts or {}, record.introduction)
            if difference:
                self._end(record, Fate.REFUSED, difference)
            return
        if self.standing.facts is None or (self.standing.founded == 0 and not self.census.has_witness(record)):
            mine = record.introduction
            self._keep(
                facts=mine.facts,
                parameters=mine.parameters,
                ranges=mine.ranges,
                leased=mine.leased,
                witness=record.member,
            )
            return
        difference = founding.difference(self.standing.facts, self.standing.parameters, record.introduction)
        if difference:
            self._end(record, Fate.REFUSED, difference)
            self._end_founding(record, difference)

    def _end_founding(self, refused: MemberRecord, difference: str) -> None:
        """Which of two is the wrong one is not known before the run has begun: it must not begin with either. Later,
        the run is right and the newcomer is not."""
        witness = self.records.get(self.standing.witness)
        if self.standing.current is not None or (self.standing.founded and (witness is None or witness.fate)):
            return
        if witness is None or witness.fate:
            witness = next(record for record in self.census.alive if record is not refused)
        self.fail(
            f"the workers do not fit together: {refused.describe()} differs from {witness.describe()}: {difference}\n"
            f"likely cause: {founding.likely_cause(difference)}"
        )

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> None:
        """Nothing will come of this run any more."""
        if not self.standing.over:
            self._keep(over="failed", reason=reason)
            self._note("failed", None, reason)

    def _release_idle(self) -> None:
        """Let go who has left, and who wants to go and has no seat."""
        for record in self.census.alive:
            current, holds = self.standing.current, record.report.applied > NOTHING
            if self.plan_of(record.member) is None and ((holds and current is not None) or record.is_going):
                is_holder = bool(founding.holders([record]))
                if is_holder and current is None and not self.standing.founded:
                    continue  # the journal is lost, and the run goes on from it first
                if is_holder and current is not None and not record.is_going:
                    late = f"it came with operation {record.report.applied} when {founding.GONE_ON}"
                    self._end(record, Fate.EVICTED, late)  # it comes back as another
                    continue
                self._end(record, Fate.RELEASED, "left the run")

    def _release_all(self) -> None:
        for record in [*self.census.alive, *self.census.servers]:
            self._end(record, Fate.RELEASED, self.standing.reason)
        if not self._announced:
            self._announced = True
            self._actions.append(RunOver(self.standing.over == "failed", self.standing.reason))

    # -- saying ------------------------------------------------------------------------------------------------------

    def _root_cause(self) -> str:
        return self.census.root_cause(self._agents.last_exit(), set(self._agents))

    def _tell_all(self) -> None:
        for record in self.records.values():
            if record.connected:
                self._actions += self._speech.to_member(record, self.standing, self.placement, asked=False)
        for agent in self._agents:
            self._tell_agent(agent, asked=False)

    def _answer(self, event: Event) -> None:
        """Who spoke is answered, so that it knows that it was heard."""
        if isinstance(event, AgentReport):
            self._tell_agent(event.agent, asked=True)
        if not isinstance(event, Report):
            return
        record = self.records.get(event.member)
        if record is not None:
            self._actions += self._speech.to_member(record, self.standing, self.placement, asked=True)
        else:
            self._actions.append(self._speech.to_stranger(event.member, self.standing))

    def _tell_agent(self, agent: str, *, asked: bool) -> None:
        self._actions += self._speech.to_agent(agent, self._agents, self.records.values(), self.standing, asked=asked)

    def _grant(self, asked: Sequence[str]) -> None:
        grants = self._dispatcher.grants(self.standing.term, asked)
        if any(grant.is_finished for grant in grants):
            self._keep_leases()  # a coordinator that comes back must not say anything else
        self._actions += [TellLeases(grant) for grant in grants]

    # -- remembering -------------------------------------------------------------------------------------------------

    def _keep(self, **changes: object) -> None:
        self.standing = msgspec.structs.replace(self.standing, **changes)
        self._actions.append(Remember("standing", msgspec.msgpack.encode(self.standing)))

    def _save(self, record: MemberRecord) -> None:
        self._actions.append(Remember(f"member/{record.member}", record.durable()))

    def _note(self, kind: str, record: MemberRecord | None, text: str) -> None:
        self._actions.append(Note(kind, record.member if record else "", text))
