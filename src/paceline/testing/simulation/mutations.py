"""Faults put into the machines on purpose: the simulator must see each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from paceline.control.coordinator import Coordinator
from paceline.control.member import Member
from paceline.control.member_events import Done
from paceline.control.messages import Phase, Plan, Report, Verdict


class Mutation(NamedTuple):
    name: str
    member: Callable[[str], Member] = Member
    coordinator: Callable[..., Coordinator] = Coordinator


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
        return msgspec.structs.replace(report, applied=report.applied - 1) if report.applied > 0 else report


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
    def _on_done(self, event: Done) -> None:
        super()._on_done(event)
        if self.agreed is not None and self.phase is Phase.ACTIVE:
            self._switch()


class _WaitsForNoPromise(Coordinator):
    def _recover(self) -> None:
        for record in self.census.participants(self.standing):
            record.report = msgspec.structs.replace(record.report, fenced=self.standing.fence)
        super()._recover()


class _IgnoresWhoIsAhead(Coordinator):
    def _recover(self) -> None:
        super()._recover()
        current = self.standing.current
        if current is not None and current.gifts and current.generation == self.standing.fence:
            self._keep(current=msgspec.structs.replace(current, gifts={}, base=current.base - 1))


class _KeepsTheParted(Coordinator):
    """Goes on with all, and with those who did not go for any other reason, as if they could reach each other."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._surveys.parted = lambda *_: []  # type: ignore[method-assign]
        self._conflicts.worst_of = lambda *_: None  # type: ignore[method-assign]


class _RemembersNoPlan(Coordinator):
    def _keep(self, **changes: object) -> None:
        super()._keep(**changes)
        if "current" in changes or "pending" in changes:
            self._actions.pop()


SOUND = Mutation("sound")
MUTATIONS = [
    Mutation("counts the holders of a next plan, not what their slots name", member=_CountsHolders),
    Mutation("counts as a holder of state that has not arrived", member=_HoldsBeforeItHas),
    Mutation("promises to leave a generation, and goes on in it", member=_KeepsNoPromise),
    Mutation("says less than it has applied", member=_SaysLess),
    Mutation("exits before all have acknowledged the end", member=_LeavesEarly),
    Mutation("switches where loop bodies have yet to run", member=_SwitchesAnywhere),
    Mutation("makes a plan before all have promised", coordinator=_WaitsForNoPromise),
    Mutation("starts from the one behind, not the one ahead", coordinator=_IgnoresWhoIsAhead),
    Mutation("goes on with hosts that cannot reach each other", coordinator=_KeepsTheParted),
    Mutation("forgets what it told when it comes back", coordinator=_RemembersNoPlan),
]
