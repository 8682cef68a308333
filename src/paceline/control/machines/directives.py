"""What the coordinator says to members and agents, as a function of what it knows: no decision is made here.

A directive is everything that matters for its receiver, so one that is lost needs no other care than the next one. Who
has heard the present state of things is told again only when it asks.
"""

from __future__ import annotations

from collections.abc import Iterable

from paceline.control.machines.agents import Agents
from paceline.control.machines.coordinator_events import CoordinatorState, Tell, TellAgent
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.agents import AgentDirective
from paceline.control.messages.members import Directive, Verdict
from paceline.control.messages.plan import NOTHING, Plan
from paceline.placement.placement import Placement


class DirectiveWriter:
    def __init__(self) -> None:
        self._number = 0

    def to_stranger(self, member: str, standing: CoordinatorState) -> Tell:
        """Who is not known is asked to introduce itself."""
        return Tell(Directive(standing.term, self._next(), member, Verdict.UNKNOWN))

    def to_member(
        self, record: MemberRecord, standing: CoordinatorState, placement: Placement, *, asked: bool
    ) -> list[Tell]:
        verdict = _verdict(record, standing)
        plan = plan_of(record.member, standing) if verdict is Verdict.KNOWN else None
        generation = plan.generation if plan else 0
        survey = record.survey if record.survey and record.survey.number > record.working.surveyed else None
        number = survey.number if survey else 0
        content = (verdict, generation, standing.fence, record.draining, standing.halting, placement.version, number)
        if content == record.told and not asked:
            return []
        record.told = content
        lacks = plan is not None and plan.generation > record.working.plan
        is_news = bool(placement.ranges) and placement.version > record.report.placement
        directive = Directive(
            term=standing.term,
            number=self._next(),
            member=record.member,
            verdict=verdict,
            reason=record.reason,
            fence=standing.fence if record.working.applied > NOTHING or plan else 0,
            plan=plan if lacks else None,
            leave=record.draining,
            stop=bool(standing.halting),
            placement=placement if is_news else None,
            survey=survey,
        )
        return [Tell(directive)]

    def to_agent(
        self, agent: str, agents: Agents, records: Iterable[MemberRecord], standing: CoordinatorState, *, asked: bool
    ) -> list[TellAgent]:
        over = bool(standing.over)
        records = list(records)
        doomed, refused = agents.doomed(agent, records), agents.refused(agent, records)
        lost = agents.lost(agent, records)
        if agents.is_told(agent, (doomed, over, refused, lost)) and not asked:
            return []
        directive = AgentDirective(
            term=standing.term,
            number=self._next(),
            agent=agent,
            kill=doomed,
            refused=refused,
            lost=lost,
            over=over,
            verdict=standing.reason if over else "",
            failed=standing.over == "failed",
        )
        return [TellAgent(directive)]

    def _next(self) -> int:
        self._number += 1
        return self._number


def plan_of(member: str, standing: CoordinatorState) -> Plan | None:
    """The newest plan that concerns a member: it has a seat in it, or leaves by it."""
    current, pending = standing.current, standing.pending
    is_seated = current is not None and current.rank_of(member) >= 0
    if pending is not None and (is_seated or pending.rank_of(member) >= 0):
        return pending
    return current if is_seated else None


def _verdict(record: MemberRecord, standing: CoordinatorState) -> Verdict:
    if record.fate is None:
        return Verdict.KNOWN
    if record.fate is Fate.RELEASED:
        return Verdict.FAILED if standing.over == "failed" else Verdict.RELEASED
    return Verdict.REFUSED if record.fate is Fate.REFUSED else Verdict.EVICTED
