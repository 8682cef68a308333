"""Who of a run's members lives, who is ready for a seat, and how those in a plan stand to it: questions to what the
coordinator knows of each. Nothing is decided or changed here."""

from __future__ import annotations

from collections.abc import Collection

from paceline.control.machines.coordinator_events import CoordinatorState
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.plan import NOTHING, Phase, Plan

_DIFFERENCE = "paceline.errors.Mismatch: "  # it names two members, of which the other may know why


class Census:
    """`records` has every member that ever came, by id."""

    def __init__(self) -> None:
        self.records: dict[str, MemberRecord] = {}

    # -- who is there ------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[MemberRecord]:
        """The workers that live; servers are apart."""
        return [record for record in self.records.values() if record.fate is None and not record.is_server]

    @property
    def servers(self) -> list[MemberRecord]:
        """The servers that live."""
        return [record for record in self.records.values() if record.fate is None and record.is_server]

    def ready(self) -> list[MemberRecord]:
        """The workers that could take a seat."""
        return [record for record in self.alive if _is_ready(record)]

    def ready_servers(self) -> list[MemberRecord]:
        return [record for record in self.servers if _is_ready(record)]

    def coming(self, current: Plan) -> list[MemberRecord]:
        """Who is ready for a seat and has none."""
        return [record for record in self.ready() if current.rank_of(record.member) < 0]

    def staying(self, current: Plan) -> list[MemberRecord]:
        """Who has a seat and does not want, nor was asked, to leave it."""
        return [record for record in self.of(current) if not record.is_going]

    def of(self, plan: Plan) -> list[MemberRecord]:
        return [self.records[member] for member in plan.members]

    def outside(self, plan: Plan) -> list[MemberRecord]:
        """Who lives, has a seat there as a newcomer, and has not got the state yet."""
        newcomers = [self.records[member] for member in plan.newcomers]
        return [record for record in newcomers if record.fate is None and record.working.applied == NOTHING]

    def participants(self, standing: CoordinatorState) -> list[MemberRecord]:
        """Who lives and has a seat in the plan in force or in the one that is prepared."""
        plans = [plan for plan in (standing.current, standing.pending) if plan is not None]
        names = dict.fromkeys(member for plan in plans for member in plan.members)
        found = [self.records[name] for name in names if name in self.records]
        return [record for record in found if record.fate is None]

    def at_work(self, current: Plan, pending: Plan | None) -> list[MemberRecord]:
        """Who has a seat in the plan in force, and if the switch to the next has begun, who came by that."""
        seats = dict.fromkeys(current.members)
        if pending is not None and self.has_begun(pending, current):
            seats |= dict.fromkeys(pending.members)
        return [self.records[member] for member in seats]

    def has_begun(self, pending: Plan, current: Plan) -> bool:
        """Whether the switch was made by one that lives or has died: it works there, or got the state there, also if
        its group broke since and it works nowhere now. A coordinator that comes back may hear of it from a newcomer
        alone."""
        if any(record.working.generation == pending.generation for record in self.of(current)):
            return True
        newcomers = (record for record in self.of(pending) if current.rank_of(record.member) < 0)
        return any(record.working.applied > NOTHING for record in newcomers)

    def is_any_unheard(self, pending: Plan) -> bool:
        """Whether one that lives has not spoken since the coordinator came back: it may have made the switch."""
        return any(record.fate is None and record.report.number == 0 for record in self.of(pending))

    def has_witness(self, newcomer: MemberRecord) -> bool:
        """Whether somebody that lives has the facts that newcomers are compared with."""
        return any(record is not newcomer for record in self.alive)

    # -- how they stand to a plan ------------------------------------------------------------------------------------

    def all_work_in(self, plan: Plan) -> bool:
        return all(_works_in(plan, record) for record in self.of(plan))

    def any_has_fallen(self, plan: Plan) -> bool:
        """Whether one that has a seat there is gone, or could not form that group."""
        return any(record.fate is not None or record.working.broken == plan.generation for record in self.of(plan))

    def is_troubled(self, standing: CoordinatorState) -> bool:
        """Whether the plan in force cannot go on."""
        current, pending = standing.current, standing.pending
        if current is None:
            return False
        next_generation = pending.generation if pending is not None else current.generation
        for record in self.of(current):
            if record.fate is not None or record.working.fenced > current.generation:
                return True
            if record.working.generation > current.generation and record.working.generation != next_generation:
                return True  # it switched to a plan that was withdrawn
        return pending is not None and self.has_begun(pending, current) and self.any_has_fallen(pending)

    def known_placement(self) -> int:
        """The newest version of the placement that anybody who lives was told of."""
        return max((record.report.placement for record in [*self.alive, *self.servers]), default=0)

    # -- what became of them -----------------------------------------------------------------------------------------

    def reached(self) -> int:
        """The last operation that anybody ever applied."""
        return max((record.working.applied for record in self.records.values()), default=NOTHING)

    def root_cause(self, last_exit: str, agents: Collection[str]) -> str:
        """Why the run failed: what the first member that failed said, if it can say more than that it met another which
        did something else; else how the last one died. `last_exit` is how the last process ended that an agent had.
        Members of other agents than these are of an earlier session, which this one resumed."""
        members = [record for record in self.records.values() if record.introduction.agent in agents]
        failed = [record for record in members if record.fate is Fate.FAILED]
        if failed:
            first = min(failed, key=lambda record: _DIFFERENCE in record.reason)
            return f"{first.describe()} raised in operation {first.working.applied + 1}:\n{first.reason}"
        gone = [record for record in members if record.reason]
        if gone:
            return f"{gone[-1].describe()}: {gone[-1].reason}"
        return f"no worker came up; the last process {last_exit}" if last_exit else "there are no workers"


def _is_ready(record: MemberRecord) -> bool:
    return record.connected and record.report.phase is Phase.READY and not record.is_going


def _works_in(plan: Plan, record: MemberRecord) -> bool:
    working = record.working
    is_there = working.generation == plan.generation and working.formed >= plan.generation
    return record.fate is None and is_there and working.applied > NOTHING
