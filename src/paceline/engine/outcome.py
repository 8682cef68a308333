"""How far a run is for its agent, and what became of it: a pure function of how its processes ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from paceline.control.exit_codes import HALTED, INCOMPLETE, START_AGAIN, exit_words
from paceline.engine.events import RunOutcome, RunResult
from paceline.engine.slots import AgentRules, Slot


class SupervisorStage(Enum):
    WORKING = "working"
    ASKED = "asked"  # to end, by a person
    OVER = "over"  # the coordinator says so
    FAILING = "failing"  # found out here
    HALTED = "halted"  # the coordinator is gone for good: workers leave what they hold on this host, and end


class RunEnd(NamedTuple):
    """`asked` is the signal by which a person asked for the end, 0 if nobody did. It has failed if the coordinator says
    so; where it is failing that was found out here, and `culprit` is where to look. `released` are processes that the
    coordinator let go in peace."""

    rules: AgentRules
    workers: Sequence[Slot]
    servers: Sequence[Slot]
    asked: int
    stage: SupervisorStage
    has_failed: bool
    culprit: Slot | None
    has_sessions: bool
    released: frozenset[int]
    reason: str


def outcome_of(end: RunEnd) -> RunOutcome:
    if end.asked:
        return RunOutcome(RunResult.INTERRUPTED, 128 + end.asked, reason=end.reason)
    if end.has_failed and end.stage is SupervisorStage.OVER:
        return RunOutcome(RunResult.FAILED, 1, reason=end.reason)
    if end.stage is SupervisorStage.HALTED:
        return RunOutcome(RunResult.HALTED, HALTED, reason=end.reason)
    if end.stage is SupervisorStage.FAILING:
        number = end.culprit.number if end.culprit is not None else -1
        code = _own_code(end.culprit) if not end.has_sessions else 1
        return RunOutcome(RunResult.FAILED, code, number, end.reason)
    failed = [slot for slot in _own_slots(end) if slot.code and not slot.was_ended]
    if (later := _failed_later(end, failed)) is not None:
        return RunOutcome(RunResult.FAILED_LATER, _own_code(later), later.number, end.reason)
    if failed and not end.rules.owns_coordinator and len(failed) == len(_own_slots(end)):
        # All processes of a guest: nothing here took part to the end.
        return RunOutcome(RunResult.FAILED, 1, failed[0].number, end.reason)
    missing = tuple(f"{slot.label} {how}" for slot in end.workers if (how := _how_lost(slot, failed)))
    code = INCOMPLETE if missing and end.rules.strict else 0
    return RunOutcome(RunResult.ENDED, code, reason=end.reason, missing=missing)


def _own_slots(end: RunEnd) -> Sequence[Slot]:
    """Those that speak for this agent: servers only where there is nothing else."""
    return end.workers or end.servers


def _failed_later(end: RunEnd, failed: Sequence[Slot]) -> Slot | None:
    """A worker that was let go in peace and failed after that, perhaps before the agent knew that all was over; a
    guest knows of nobody's release, but of the end."""
    if end.rules.owns_coordinator:
        return next((slot for slot in failed if slot.pid in end.released), None)
    return next((slot for slot in failed if slot.outlived_run), None)


def _how_lost(slot: Slot, failed: Sequence[Slot]) -> str:
    """Why the run ended without this worker, if it did; one that failed may have had no time to come back."""
    has_failed = slot in failed and (slot.code or 0) > 0 and slot.code != START_AGAIN
    return slot.lost or (exit_words(slot.code or 0) if has_failed else "")


def _own_code(slot: Slot | None) -> int:
    """The script's own, as a shell would say it."""
    code = (slot.code if slot is not None else None) or 1
    return code if code > 0 else 128 - code
