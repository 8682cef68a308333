"""One schedule, from its first process to its last, and what was wrong with it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

from paceline.testing.chaos import checks, copies, expecting, faults, leftovers
from paceline.testing.chaos.expecting import Injury
from paceline.testing.chaos.placing import is_settled
from paceline.testing.chaos.schedule import Fault, FaultKind, Schedule
from paceline.testing.chaos.stage import ChaosRun, ChaosTimeout
from paceline.testing.netlab import NetlabError

_TICK_S = 0.02
_AT_REST_S = 1.0  # a last look at the run before it is let go


@dataclass
class Played:
    """`acted` are the kinds of faults that were done, `skipped` those that found nobody to hit; `outages` the longest
    gap after each kind."""

    schedule: Schedule
    violations: list[str] = field(default_factory=list)
    acted: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    outages: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    num_steps: int = 0
    num_copies: int = 0  # of ranges, that were compared with another


def play(schedule: Schedule, place: Path, *, patience: float = 1.0) -> Played:
    """Everything that the run writes is below `place`, which must not exist yet. All bounds are multiplied by
    `patience`."""
    began = time.monotonic()
    played = Played(schedule)
    seen: set[int] = set()
    stage = ChaosRun(schedule, place, patience)
    try:
        with stage:
            _play(stage, played, seen)
    except NetlabError as error:
        played.violations.append(f"the lab: {error}")
    workers = list(stage.beats.look().values())
    played.violations += stage.violations
    played.violations += leftovers.left_of(stage.processes, seen, place)
    played.outages = checks.longest_gaps(stage.injuries, workers)
    played.num_steps = sum(len(worker.steps) for worker in workers)
    played.num_copies = copies.num_compared(copies.read(place))
    played.seconds = time.monotonic() - began
    return played


def _play(stage: ChaosRun, played: Played, seen: set[int]) -> None:
    try:
        _start(stage)
        before = leftovers.descriptors_of(stage.processes())
        _act_all(stage, played)
        _come_to_rest(stage)
        played.violations += leftovers.grown(before, leftovers.descriptors_of(stage.processes()))
        seen.update(stage.processes())
        _finish(stage)
    except ChaosTimeout as stuck:
        played.violations.append(str(stuck))
        ended = [command for command in stage.commands if not command.is_alive and command.code not in command.expected]
        played.violations += [
            text for text in checks.exit_codes(stage) if ended and any(str(one) in text for one in ended)
        ]
        return
    played.violations += checks.violations_of(stage)


def _start(stage: ChaosRun) -> None:
    stage.start_run()
    faults.let_join(stage)
    _wait_strong(stage, expecting.START_S)
    stage.began = time.monotonic()
    (stage.place / "began").touch()


def _wait_strong(stage: ChaosRun, timeout_s: float) -> None:
    """Until as many workers step as should."""

    def is_strong() -> bool:
        _check_goes_on(stage)
        return len(stage.at_work()) >= stage.num_wanted()

    stage.wait_until(is_strong, timeout_s, lambda: _strength(stage))


def _check_goes_on(stage: ChaosRun) -> None:
    if not stage.run.is_alive:
        raise ChaosTimeout(f"the run ended too early, with exit code {stage.run.code}")


def _strength(stage: ChaosRun) -> str:
    return f"{stage.num_wanted()} workers at work (there are {len(stage.at_work())})"


def _act_all(stage: ChaosRun, played: Played) -> None:
    """Faults in order of time. What takes long, such as a new start of the run, moves all that follow."""
    shift_s = 0.0
    for fault in stage.schedule.faults:
        due = stage.began + fault.at_s + shift_s
        while time.monotonic() < due:
            stage.tick()
            _check_goes_on(stage)
            time.sleep(_TICK_S)
        _act(stage, fault, played)
        shift_s = max(shift_s, time.monotonic() - stage.began - fault.at_s)
    while stage.has_later:
        stage.tick()
        time.sleep(_TICK_S)


def _act(stage: ChaosRun, fault: Fault, played: Played) -> None:
    _wait_somebody(stage)
    if fault.kind in expecting.SHUTS_THE_DOOR:
        _wait_entered(stage)
    if expecting.takes_servers(stage.schedule, fault) and stage.schedule.replicas > 1:
        _wait_placed(stage)
    began = time.monotonic()
    hit = faults.ACT[fault.kind](stage, fault)
    if hit.skipped:
        played.skipped.append(fault.kind.value)
        return
    played.acted.append(fault.kind.value)
    now, victims = time.monotonic(), frozenset(hit.victims)
    takes_all = fault.kind in (FaultKind.KILL, FaultKind.PAIR) and not stage.living()
    stage.injuries.append(Injury(fault, began, max(now, began + fault.length_s), victims, takes_all))
    if hit.lift is not None:
        stage.later(began + fault.length_s, hit.lift)


def _wait_somebody(stage: ChaosRun) -> None:
    """Until a worker is at work: a fault that hits nobody shows nothing."""

    def is_somebody() -> bool:
        _check_goes_on(stage)
        return bool(stage.at_work())

    if stage.schedule.faults and not any(one.ended > time.monotonic() for one in stage.injuries):
        stage.wait_until(is_somebody, expecting.START_S, "a worker at work again")


def _wait_entered(stage: ChaosRun) -> None:
    """Until whoever joins is inside: a command that finds no run is right to say so and to end."""
    stage.wait_until(lambda: not stage.entering(), expecting.START_S, "those who join to be inside")


def _wait_placed(stage: ChaosRun) -> None:
    """Until every range is on as many servers as it should be: before that, one server less may be one too many."""
    stage.wait_until(lambda: is_settled(stage), expecting.SETTLE_S, "all ranges on as many servers as they should be")


def _come_to_rest(stage: ChaosRun) -> None:
    """Until the run is as strong as it was, and stays so for a moment."""
    weak_at = time.monotonic()

    def is_at_rest() -> bool:
        nonlocal weak_at
        _check_goes_on(stage)
        if len(stage.at_work()) < stage.num_wanted():
            weak_at = time.monotonic()
        return time.monotonic() - weak_at > _AT_REST_S

    stage.wait_until(is_at_rest, expecting.RETURN_S, lambda: _strength(stage))


def _finish(stage: ChaosRun) -> None:
    (stage.place / "enough").touch()
    stage.wait_until(
        lambda: not any(command.is_alive for command in stage.commands), expecting.END_S, "the end of all commands"
    )
