"""A shorter schedule that fails too. Pure but for the trial, which is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paceline.testing.chaos.drawing import is_legal
from paceline.testing.chaos.schedule import Fault, FaultKind, Schedule


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], *, most_trials: int = 40) -> Schedule:
    """The shortest that was found; `fails` plays one, perhaps more than once, and says whether it is still wrong.
    Faults that were not enough are not tried again in a smaller run: a trial takes a minute."""
    trials = 0
    enough_not: set[tuple[Fault, ...]] = set()
    while True:
        for smaller in smaller_ones(schedule):
            if smaller.faults in enough_not:
                continue
            if trials == most_trials:
                return schedule
            trials += 1
            if fails(smaller):
                schedule = smaller
                break
            if smaller.faults != schedule.faults:
                enough_not.add(smaller.faults)
        else:
            return schedule


def smaller_ones(schedule: Schedule) -> Iterator[Schedule]:
    """Schedules with one thing less, what saves most first; all of them legal."""
    half = len(schedule.faults) // 2
    if len(schedule.faults) > 1:
        yield replace(schedule, faults=())
    if half > 1:
        yield replace(schedule, faults=schedule.faults[half:])
        yield replace(schedule, faults=schedule.faults[:half])
    for number in range(len(schedule.faults)):
        yield schedule.without(number)
    for field, least in (("hosts", 1), ("workers", 1), ("loaders", 0), ("evaluates", 0), ("servers", 1)):
        value = getattr(schedule, field)
        if value > least:
            try:
                smaller = replace(schedule, **{field: value - 1})
            except ValueError:
                continue  # as many servers as replicas
            if _is_legal(smaller):
                yield smaller


def _is_legal(schedule: Schedule) -> bool:
    """Whether every fault finds what it needs in the smaller run."""
    places = all(
        fault.target < schedule.hosts
        for fault in schedule.faults
        if fault.kind in (FaultKind.CUT, FaultKind.ONEWAY, FaultKind.SLOW, FaultKind.AGENT)
    )
    return places and all(
        is_legal(schedule, list(schedule.faults[:number]), fault.kind) for number, fault in enumerate(schedule.faults)
    )
