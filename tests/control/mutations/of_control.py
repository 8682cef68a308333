"""Faults of the coordinator, of its driver's choices and of members."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from paceline.collective.agreement import Agreed, Course, agreed
from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Event
from paceline.control.machines.founding import Founding
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import OperationDone
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.planner import Planner
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.members import Directive, Report, Verdict
from paceline.control.messages.plan import NOTHING, Phase, Plan
from tests.control.mutations.mutating import mutated


class _CountsHolders(Member):
    def _all_hold_offered(self, held: tuple[int, ...]) -> bool:
        return self._offered is not None and all(held)


class _KeepsNoPromise(Member):
    def _promise(self, fence: int) -> bool:
        is_news = fence > self.fenced
        self.fenced = max(fence, self.fenced)
        return is_news


class _SaysLess(Member):
    """One operation is settled when the next is done; whoever says less than it has applied lets it be undone."""

    def report(self) -> Report:
        report = super().report()
        working = report.working
        working = msgspec.structs.replace(working, applied=working.applied - (working.applied > 0))
        return msgspec.structs.replace(report, working=working)


class _HoldsBeforeItHas(Member):
    """It counts as one that has the state when its group is there, and not when the state is."""

    def _start(self) -> None:
        if self.plan is not None and not self.holds_state:
            self.applied = max(0, self.plan.base)
        super()._start()


class _LeavesEarly(Member):
    def _apply(self, plan: Plan, operation: int) -> None:
        super()._apply(plan, operation)
        if self.phase is Phase.ENDED:
            self._end(Verdict.RELEASED, "the end")


class _SwitchesAnywhere(Member):
    def _on_done(self, event: OperationDone) -> None:
        super()._on_done(event)
        if self.agreed is not None and self.phase is Phase.ACTIVE:
            self._switch()


class _WaitsForNoPromise(Planner):
    def recover(self, current: Plan) -> None:
        standing = self._memory.standing
        for record in self._census.participants(standing):
            working = msgspec.structs.replace(record.working, fenced=standing.fence)
            record.report = msgspec.structs.replace(record.report, working=working)
        super().recover(current)


class _IgnoresWhoIsAhead(Planner):
    def recover(self, current: Plan) -> None:
        super().recover(current)
        standing = self._memory.standing
        plan = standing.current
        if plan is not None and plan.gifts and plan.generation == standing.fence:
            self._memory.keep(current=msgspec.structs.replace(plan, gifts={}, base=plan.base - 1))


class _KeepsTheParted(Planner):
    """Goes on with all, and with those who did not go for any other reason, as if they could reach each other."""

    def __init__(self, memory: CoordinatorMemory, host: str) -> None:
        super().__init__(memory, host)
        self._surveys.parted = lambda *_: []  # type: ignore[method-assign]
        self._conflicts.worst_of = lambda *_: None  # type: ignore[method-assign]


class _RemembersNoPlan(CoordinatorMemory):
    def keep(self, **changes: object) -> None:
        super().keep(**changes)
        if "current" in changes or "pending" in changes:
            self.actions.pop()


class _GoesByTheClock(Coordinator):
    """A pause of its own counts as silence of the others."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._clock._stall_s = 1e9


class _SendsAPlanOnce(Choices):
    """Also where the connection that it went by is lost."""

    def lighten(self, directive: Directive, now: float) -> Directive:
        return super().lighten(directive, 0.0)

    def merge(self, events: Sequence[Event], has_line: Callable[[str], bool]) -> list[Event]:
        kept = dict(self._on_the_way)
        chosen = super().merge(events, has_line)
        self._on_the_way = kept
        return chosen


class _DismissesHolders(Founding):
    """Whoever it does not know has nothing that is worth keeping."""

    def _adopt_holders(self, state_holders: list[MemberRecord]) -> None:
        for record in state_holders:
            self._memory.end(record, Fate.EVICTED, "is of no run that is known here")


class _LetsHoldersGo(Coordinator):
    """Whoever wants to leave before it knows of a plan may."""

    def _release_idle(self) -> None:
        super()._release_idle()
        for record in self.census.alive:
            if record.is_going and self.plan_of(record.member) is None:
                self._memory.end(record, Fate.RELEASED, "left the run")


class _BelievesOnlyWhoWorks(Coordinator):
    """A switch was made while one works in it: neither does a newcomer prove it that has the state, and whose group
    broke, nor is anybody waited for that has not spoken yet."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)

        def has_begun(pending: Plan, current: Plan) -> bool:
            there = [*self.census.of(current), *self.census.of(pending)]
            return any(self._works_in(pending, record) for record in there)

        self.census.has_begun = has_begun  # type: ignore[method-assign]
        self.census.is_any_unheard = lambda pending: False  # type: ignore[method-assign]

    @staticmethod
    def _works_in(plan: Plan, record: MemberRecord) -> bool:
        return record.working.generation == plan.generation and record.working.applied > NOTHING


class _HearsNobodyFirst(Founding):
    """When it comes back and knows of no run, it founds one with whoever speaks first."""

    def _may_have_forgotten(self) -> bool:
        return False


class _CountsFromOneAgain(Coordinator):
    """When its journal is lost; it learns of higher numbers only from those whom it hears."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "born": 0})


class _UsesGenerationsAgain(_CountsFromOneAgain):
    def _on_report(self, report: Report) -> bool:
        plan = min(report.working.plan, self.standing.newest)
        working = msgspec.structs.replace(report.working, plan=plan)
        return super()._on_report(msgspec.structs.replace(report, working=working))


def _keeps_its_own(largest: Sequence[int], size: int) -> Agreed:
    return Agreed(Course.KEEP) if largest[0] else agreed(largest, size)


_TOGETHER = ("allreduce",)

OF_CONTROL = [
    mutated("counts the holders of a next plan, not what their slots name", "joins", _TOGETHER, member=_CountsHolders),
    mutated("counts as a holder of state that has not arrived", "joins", _TOGETHER, member=_HoldsBeforeItHas),
    mutated("promises to leave a generation, and goes on in it", "deaths", _TOGETHER, member=_KeepsNoPromise),
    mutated("says less than it has applied", "deaths", _TOGETHER, member=_SaysLess),
    mutated("exits before all have acknowledged the end", "", _TOGETHER, member=_LeavesEarly),
    mutated("switches where loop bodies have yet to run", "joins", _TOGETHER, member=_SwitchesAnywhere),
    mutated("makes a plan before all have promised", "deaths", _TOGETHER, planner=_WaitsForNoPromise),
    mutated("starts from the one behind, not the one ahead", "deaths", _TOGETHER, planner=_IgnoresWhoIsAhead),
    mutated(
        "goes on with hosts that cannot reach each other", "partitions", _TOGETHER, num_hosts=4, planner=_KeepsTheParted
    ),
    mutated(
        "goes on with hosts that cannot reach each other, where leases are done",
        "partitions",
        ("async", "bounded"),
        num_hosts=4,
        planner=_KeepsTheParted,
    ),
    mutated("forgets what it told when it comes back", "coordinator", _TOGETHER, memory=_RemembersNoPlan),
    mutated("takes its own pause for silence of the others", "pauses", _TOGETHER, coordinator=_GoesByTheClock),
    mutated("sends a plan once, whatever becomes of the connection", "coordinator", _TOGETHER, choices=_SendsAPlanOnce),
    mutated("dismisses who holds the state of a run that it forgot", "journal", _TOGETHER, founding=_DismissesHolders),
    mutated(
        "founds a run before it has heard who may hold the state", "journal", _TOGETHER, founding=_HearsNobodyFirst
    ),
    mutated("uses generations again that it forgot", "journal", _TOGETHER, coordinator=_UsesGenerationsAgain),
    mutated(
        "takes the word of a newcomer whose group broke for nothing",
        "takeovers",
        _TOGETHER,
        coordinator=_BelievesOnlyWhoWorks,
    ),
    mutated("counts from one again when its journal is lost", "journal", _TOGETHER, coordinator=_CountsFromOneAgain),
    mutated(
        "lets go who holds a state that no plan speaks of, and leaves", "journal", _TOGETHER, coordinator=_LetsHoldersGo
    ),
    mutated(
        "keeps its own cost model, whatever the others have", "joins", _TOGETHER, num_hosts=3, agrees=_keeps_its_own
    ),
]
