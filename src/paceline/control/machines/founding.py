"""The beginning of a run, and of a coordinator that has forgotten one.

Pure rules: whether somebody is still to be waited for before the run is founded, and what is to be made of members that
know more than their coordinator, because its journal was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from paceline.control.machines.coordinator_events import CoordinatorState
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.planner import Planner
from paceline.control.machines.roster import MemberRecord
from paceline.control.machines.seating import gifts_for
from paceline.control.messages.members import Report
from paceline.control.messages.plan import NOTHING, Phase, Plan, PlanStart

GONE_ON = "the run had gone on without it"  # why one that holds a state is evicted


class Founding:
    """`is_again` if another coordinator was there before this one, also where nothing is remembered of that."""

    def __init__(self, memory: CoordinatorMemory, planner: Planner, *, is_again: bool) -> None:
        self._memory = memory
        self._census, self._agents, self._settings = memory.census, memory.agents, memory.settings
        self._planner = planner
        self._is_again = is_again
        self._began = memory.now
        self._ready_since: float | None = None
        self._has_forgotten = False
        self._has_warned = False  # of servers that are not used

    def hear(self, report: Report, record: MemberRecord | None) -> None:
        """A report may show that something was forgotten here."""
        lost = forgotten(report, self._memory.standing, is_known=record is not None)
        if lost is None:
            return
        if not self._has_forgotten:
            what = f"member {report.member} knows of generation {report.working.plan}; the journal is lost"
            self._memory.note("forgotten", record, what)
        self._has_forgotten = True
        self._memory.keep(term=lost.term, newest=lost.newest)

    def gather(self) -> None:
        """Found the run when enough members are ready."""
        memory, standing = self._memory, self._memory.standing
        if state_holders := holders(self._census.alive):
            self._adopt_holders(state_holders)
            return
        if standing.halting:
            memory.keep(over="ended", reason=standing.halting)
            return
        ready = self._census.ready()
        if not ready:
            self._ready_since = None
            if not self._census.alive and self._agents.are_spent():
                memory.fail(memory.root_cause())
            return
        if self._ready_since is None:
            self._ready_since = memory.now
        waited_s = memory.now - self._ready_since
        if self._is_to_wait_for_workers(ready, waited_s) or self._is_to_wait_for_servers(waited_s):
            return
        if not standing.founded and self._may_have_forgotten():
            return
        self._ready_since = None
        # The founder, rank 0, has the newest checkpoint; others that are like it follow in the order of their slots.
        ready.sort(key=lambda record: (-record.working.checkpoint, record.introduction.slot))
        self._found(ready[: self._settings.most])

    def _is_to_wait_for_workers(self, ready: list[MemberRecord], waited_s: float) -> bool:
        if len(ready) < self._settings.fewest:
            return True
        may_wait = waited_s < self._settings.grace_s and self._agents.may_bring_more(len(ready))
        return len(ready) < self._settings.wanted and may_wait and not has_survivor(ready)

    def _is_to_wait_for_servers(self, waited_s: float) -> bool:
        if not self._memory.standing.ranges:
            return False
        if not self._census.servers and not self._settings.servers:
            self._memory.fail(
                "the strategy of this script keeps parameters on servers, and there are none: give --servers 1"
            )
            return True
        num_ready, fewest = len(self._census.ready_servers()), max(1, self._settings.replicas)
        has_waited = num_ready >= fewest and waited_s > self._settings.grace_s
        return num_ready < max(self._settings.servers, 1) and not has_waited

    def _found(self, ready: list[MemberRecord]) -> None:
        """Anew, or again from the newest checkpoint that one of these has."""
        memory, standing = self._memory, self._memory.standing
        founder, *others = ready
        others.sort(key=lambda record: record.introduction.slot)
        base = max(founder.working.checkpoint, 0)
        generation = max(standing.newest, standing.fence - 1) + 1
        if standing.founded:
            if standing.reached > base:
                memory.note("rollback", founder, f"operations {base + 1} to {standing.reached} are done again")
            else:
                memory.note("resumed", founder, f"goes on after operation {base}")
        # Rank 0 is the one that founds, whatever slots and earlier ranks say of the others.
        seats = tuple(sorted(self._planner.seats([founder, *others]), key=lambda seat: seat.member != founder.member))
        plan = Plan(generation, PlanStart.FOUND, seats, base, gifts_for(others, [founder]))
        memory.keep(founded=standing.founded + 1, fence=generation, reached=base)
        memory.forget_leases()
        if self._settings.servers or self._census.servers:
            self.warn_of_unused()
        if standing.ranges:
            memory.place(memory.manager.found(generation, self._census.ready_servers(), standing.ranges))
            memory.keep_aim()
        self._planner.issue(plan)

    def warn_of_unused(self) -> None:
        """There are servers, and workers that may have no use for them."""
        standing = self._memory.standing
        if not standing.ranges and not self._has_warned:
            self._has_warned = True
            self._memory.note("warning", None, unused_servers(standing.facts or {}))

    # -- after the journal was lost ----------------------------------------------------------------------------------

    def _may_have_forgotten(self) -> bool:
        """A coordinator that knows of no founding may be one whose journal is lost: it hears everybody first who could
        hold the state. On which hosts they are is forgotten too, so all of them get time to come."""
        age_s, records = self._memory.now - self._began, self._census.records.values()
        if self._is_again and age_s < self._settings.listen_s:
            return True
        if not self._agents.have_come(records):
            return age_s < self._settings.listen_s
        return age_s < self._settings.silence_s and self._agents.see_unknown(records)

    def _adopt_holders(self, state_holders: list[MemberRecord]) -> None:
        """The journal is lost, and members that live hold the state: the run goes on from the newest of them."""
        memory, standing, manager = self._memory, self._memory.standing, self._memory.manager
        is_early = memory.now - self._began < self._settings.silence_s
        awaits_servers = is_early and not manager.held.card_of.keys() <= self._census.records.keys()
        if self._may_have_forgotten() or awaits_servers:
            return
        self._ready_since = None
        if standing.ranges:
            change = manager.adopt(self._census.servers, standing.ranges, self._census.known_placement())
            if change is None:
                memory.fail(
                    "the run's database is lost, and with it which server holds what, or no server that lives has some "
                    "of it; resume from the newest checkpoint"
                )
                return
            memory.place(change)
        newest = max(record.working.applied for record in state_holders)
        memory.note("adopted", None, f"{len(state_holders)} members hold the state, up to operation {newest}")
        last = max(record.working.plan for record in state_holders)
        plan = Plan(last, PlanStart.RECOVER, self._planner.seats(state_holders), newest)
        memory.keep(current=plan, fence=standing.newest + 1, founded=max(1, standing.founded), reached=newest)
        self._planner.recover(plan)


class Forgotten(NamedTuple):
    """From where a coordinator goes on that has forgotten at least this: its next term, and the newest generation."""

    term: int
    newest: int


def forgotten(report: Report, standing: CoordinatorState, *, is_known: bool) -> Forgotten | None:
    """What a report proves to be forgotten. A generation is remembered before anybody hears of it, and so is a member;
    who was told of others has heard them from a coordinator whose journal is lost."""
    has_introduced_itself = report.introduction is None and report.phase is not Phase.BUILDING and report.term > 0
    is_proof = has_introduced_itself and not is_known
    plan = report.working.plan
    if plan <= standing.newest and report.term <= standing.term and not is_proof:
        return None
    term = standing.term if report.term < standing.term else report.term + 1
    return Forgotten(term, max(plan, standing.newest))


def holds(report: Report) -> bool:
    """Whether a member holds the training state. Those who left in order do not: the others may have gone on. A founder
    does before its group is formed, if it may have done leases on servers by then."""
    working = report.working
    is_at_work = report.phase in (Phase.ACTIVE, Phase.ENDED) or (report.phase is Phase.READY and report.placement > 0)
    return working.applied > NOTHING and not working.left and is_at_work


def holders(alive: Iterable[MemberRecord]) -> list[MemberRecord]:
    """Who lives and holds the state of a run that no plan speaks of: it must not be founded anew without them."""
    return [record for record in alive if holds(record.report)]


def has_survivor(ready: Iterable[MemberRecord]) -> bool:
    """Whether one of those that are ready had a seat before. A run that has begun does not wait for who may come: they
    join later."""
    return any(record.working.plan > 0 for record in ready)


def unused_servers(facts: Mapping[str, str]) -> str:
    """What to say of servers in a run that keeps nothing on any."""
    strategy = facts.get("the strategy", "").partition(",")[0]
    named = f" (strategy={strategy!r})" if strategy else ""
    return (
        f"the servers of this run are not used: its workers keep nothing on them{named}; make the session with "
        "strategy='server' or 'hybrid', or leave out --servers"
    )
