"""Which plan comes next: when somebody is lost (`recover`), comes or goes (`change`). Pure, on what is remembered."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.control.machines.conflicts import Conflicts
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.machines.seating import gifts_for, seats_for
from paceline.control.machines.surveys import UNREACHABLE, Surveys
from paceline.control.machines.withdrawals import Withdrawals
from paceline.control.messages.plan import NOTHING, Phase, Plan, PlanStart, Seat


class Planner:
    """`host` is the coordinator's own, "" if it is not known."""

    def __init__(self, memory: CoordinatorMemory, host: str) -> None:
        self._memory = memory
        self._census = memory.census
        self._settings = memory.settings
        self._conflicts = Conflicts()
        self._surveys = Surveys(memory.settings.silence_s, host)
        self._withdrawals = Withdrawals(memory.settings.silence_s)

    # -- a plan is in force ------------------------------------------------------------------------------------------

    def watch_progress(self) -> None:
        """The switch was made, or cannot be made."""
        pending, current = self._memory.standing.pending, self._memory.standing.current
        if pending is not None and self._census.all_work_in(pending):
            self._memory.keep(current=pending, pending=None)
            return
        if pending is None and (current is None or not self._census.outside(current)):
            return
        plan = pending or current
        if plan is not None and self._census.any_has_fallen(plan):
            self._withdrawals.note(plan, self._memory.now)

    def change(self, current: Plan) -> None:
        """Prepare the next plan if somebody comes or goes, and no switch is under way that may yet be made."""
        pending = self._memory.standing.pending
        if pending is not None:
            if not self._census.any_has_fallen(pending) or self._census.is_any_unheard(pending):
                return
            self._blame(pending, [record for record in self._census.of(pending) if current.rank_of(record.member) < 0])
            if not self._withdrawals.may_go_on(current, self._census.of(pending), self._memory.now):
                return
        elif not self._census.all_work_in(current):
            return
        if self._settings.drop_stragglers:
            self._drop_straggler(current)
        is_changed = self._switch(current)
        if not is_changed and pending is not None:
            self._memory.keep(pending=None)

    def _drop_straggler(self, current: Plan) -> None:
        """One at a time, on the main member's word: what the next one costs is seen when this one is gone."""
        staying = self._census.staying(current)
        if len(staying) < len(current.members) or len(staying) <= self._settings.fewest:
            return
        working = self._census.records[current.members[0]].working
        if working.burden_in == current.generation and current.rank_of(working.burden) >= 0:
            record = self._census.records[working.burden]
            self._memory.drain(record, f"costs more than it gives: {working.why_burden}")

    def _switch(self, current: Plan) -> bool:
        """To the next plan, if it would be another one than the present; whether something comes in the place of a
        switch that broke, or may come of it yet."""
        memory, members = self._memory, self._census.of(current)
        if any(record.report.phase is Phase.ENDED for record in members):
            return False
        staying = self._census.staying(current)
        coming = self._coming(current, staying or members)
        if not staying and coming and not memory.standing.halting:
            staying = members  # they hand over first, and go with the next
        if not staying and not memory.standing.halting:
            if self._census.coming(current) and not self._is_open(members):
                return True  # they hand over when they are at leases again
            memory.wind_down("all members were asked to leave")
        if not staying or (len(staying) == len(current.members) and not coming):
            return False
        if self._withdrawals.is_too_early([*staying, *coming], memory.now):
            return False
        if memory.standing.leased:  # where there is no step, there is no header to agree on a switch in
            memory.keep(fence=memory.standing.newest + 1)
            self.recover(current)
            return True
        generation, gifts = memory.standing.newest + 1, gifts_for(coming, staying)
        self.issue(Plan(generation, PlanStart.SWITCH, self.seats([*staying, *coming]), NOTHING, gifts))
        return True

    # -- after a loss ------------------------------------------------------------------------------------------------

    def recover(self, current: Plan) -> None:
        """Make the next plan as soon as everybody that lives has promised to leave the old ones alone."""
        memory, standing = self._memory, self._memory.standing
        survivors = self._census.participants(standing)
        if any(record.working.fenced < standing.fence for record in survivors):
            return
        self._blame(current, self._census.outside(current))
        holders = self._holders(survivors)
        if not holders:
            self._lose_state(current)
            return
        leaving = self._surveys.parted(holders, current.generation, standing.fence, standing.term, memory.now)
        if leaving is None:
            return  # members find out whom they can reach
        if leaving:
            holders = self._part(holders, leaving)
        elif (culprit := self._conflicts.worst_of(holders, current.generation)) is not None:
            memory.end(culprit, Fate.EVICTED, UNREACHABLE)
            holders.remove(culprit)
        base = max(record.working.applied for record in holders)
        for record in [record for record in holders if record.working.applied < base - 1]:
            memory.end(record, Fate.RELEASED, "it had left when the others went on")
            holders.remove(record)
        ahead = [record for record in holders if record.working.applied == base]
        gifts = gifts_for([record for record in holders if record.working.applied == base - 1], ahead)
        coming = self._coming(current, holders) if standing.leased else []
        if self._withdrawals.is_too_early([*holders, *coming], memory.now):
            coming = []
        gifts |= gifts_for(coming, ahead)
        newcomers = tuple(record.member for record in coming)
        seats = self.seats([*holders, *coming])
        self.issue(Plan(standing.fence, PlanStart.RECOVER, seats, base, gifts, newcomers))

    def _holders(self, survivors: Iterable[MemberRecord]) -> list[MemberRecord]:
        """Who has the training state, and goes on with it."""
        holders = [record for record in survivors if record.working.applied > NOTHING]
        if self._memory.standing.leased and any(not record.is_going for record in holders):
            holders = [record for record in holders if not record.is_going]  # they go when their lease is done
        if all(record.working.left for record in holders):
            return []  # those whom they left may have gone on, and have said so to nobody that lives
        return holders

    def _lose_state(self, current: Plan) -> None:
        memory = self._memory
        if all(record.fate is Fate.FAILED for record in self._census.of(current)):
            memory.fail(memory.root_cause())  # it would fail again
            return
        memory.keep(current=None, pending=None, reached=max(self._census.reached(), memory.standing.reached))
        memory.note("lost", None, "nobody that lives holds the training state; the newest checkpoint has it")

    def _part(self, holders: list[MemberRecord], leaving: list[MemberRecord]) -> list[MemberRecord]:
        """Some cannot reach each other: go on without these. Too few are left only to save what they have."""
        for record in leaving:
            self._memory.end(record, Fate.EVICTED, f"{UNREACHABLE}, and more workers can go on without it")
        holders = [record for record in holders if record not in leaving]
        if len(holders) < self._settings.fewest:
            self._memory.halt(f"hosts cannot reach each other, and only {len(holders)} workers can go on (--min)")
        return holders

    def _blame(self, plan: Plan, newcomers: Sequence[MemberRecord]) -> None:
        """The group of a plan cannot be formed. A newcomer that lives but cannot be reached goes; one that complains of
        a member goes when it does so of the next plan too. Whoever is dying is found out anyway, and nobody is to blame
        for that. While answers are waited for, this is looked at again and again."""
        for record in self._census.of(plan):
            if record.fate is not None or record.working.broken != plan.generation:
                continue
            for name in record.working.suspects:
                suspect = self._census.records.get(name)
                if suspect is None or suspect.fate is not None or not suspect.connected:
                    continue
                if suspect in newcomers:
                    self._memory.end(suspect, Fate.EVICTED, f"{UNREACHABLE}: member {record.member} cannot")
                elif record in newcomers and self._conflicts.are_repeated_in(plan.generation, record.member, name):
                    self._memory.end(record, Fate.EVICTED, f"{UNREACHABLE}: it cannot reach member {name}")

    # -- seats -------------------------------------------------------------------------------------------------------

    def _coming(self, current: Plan, members: list[MemberRecord]) -> list[MemberRecord]:
        """Who gets a seat beside these members, or in place of those that leave."""
        if not self._is_open(members):
            return []
        staying = [record for record in members if not record.is_going]
        ready, everybody = self._census.coming(current), self._census.records.values()
        coming = self._surveys.admitted(ready, staying, everybody, self._memory.standing.term, self._memory.now)
        return coming[: max(0, self._settings.most - len(staying))]

    def _is_open(self, members: list[MemberRecord]) -> bool:
        """Whether others may join these now: where leases are done, not between the operations of an epoch's end."""
        return not self._memory.standing.leased or all(record.working.joinable for record in members)

    def seats(self, records: Iterable[MemberRecord]) -> tuple[Seat, ...]:
        standing = self._memory.standing
        return seats_for(records, standing.pending or standing.current, self._settings.shares)

    def issue(self, plan: Plan) -> None:
        if plan.start is PlanStart.SWITCH:
            self._memory.keep(newest=plan.generation, pending=plan)
        else:
            self._memory.keep(newest=plan.generation, current=plan, pending=None)
        text = f"generation {plan.generation} ({plan.start.value}): {', '.join(plan.members)}"
        self._memory.note("plan", None, text)
