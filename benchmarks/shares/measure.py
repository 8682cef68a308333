"""Workers of unequal speed, one contender after the other, in processes of their own for each.

A worker's speed is a quota of the kernel where it can be had, else it sleeps; timed work takes as long as it is to. The
sum of what the workers do alone is measured in the same round as what they do together, so that whatever else the
machine does falls on both.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common import turns
from benchmarks.common.coordinating import coordinator
from benchmarks.common.figures import tell
from benchmarks.common.slowness import Quota, quota_obstacle
from benchmarks.shares import trainers
from benchmarks.shares.plan import ALONE, AT_ONCE, AUTO, CNN, DDP, EQUAL, Plan
from benchmarks.shares.trainers import NUM_WARM, Trained
from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.crew import Crew

TIMEOUT_S = 900.0
SETTLED = 20
_TRIAL_STEPS, _LEAST_STEPS = 5, 10
_RELIEVED = 0.7  # of what a worker took before it became slower


@dataclass
class Results:
    """By round: samples a second of each worker alone, and of all together with each contender; the shares that they
    came to, and how often these changed after the first `SETTLED` steps; what part of the sum of all alone was done
    while speeds changed. `relief` are, for each time that a worker became slower, the steps before its share
    followed."""

    by_quota: bool
    alone: list[list[float]] = field(default_factory=list)
    together: dict[str, list[float]] = field(default_factory=dict)
    shares: list[list[int]] = field(default_factory=list)
    late_changes: list[int] = field(default_factory=list)
    changing: list[float] = field(default_factory=list)
    relief: list[int] = field(default_factory=list)


def run(plan: Plan) -> Results:
    results = Results(by_quota=plan.work == CNN and not quota_obstacle())
    for number in range(plan.num_rounds):
        tell(number, ALONE)
        alone = _alone(plan, results.by_quota)
        results.alone.append(alone)
        for contender in turns([contender for contender in plan.contenders if contender != ALONE], number):
            tell(number, contender)
            if contender == AT_ONCE:
                results.together.setdefault(contender, []).append(_at_once(plan, alone, results.by_quota))
                continue
            rate, shares = _together(plan, contender, sum(alone), results.by_quota)
            results.together.setdefault(contender, []).append(rate)
            if contender == AUTO:
                results.shares.append([of_one[-1] for of_one in shares])
                results.late_changes.append(_late_changes(shares))
        if plan.change_every:
            tell(number, "speeds that change")
            part, relief = _changing(plan, sum(alone), results.by_quota)
            results.changing.append(part)
            results.relief += relief
    return results


# -- one contender -----------------------------------------------------------------------------------------------------


def _alone(plan: Plan, by_quota: bool) -> list[float]:
    """Samples a second of each worker while the others rest."""
    rates = []
    with _workers(plan, by_quota) as (crew, _):
        for rank in range(crew.size):
            slowness = 1.0 if by_quota else 1.0 / plan.speeds[rank]
            num_steps = _TRIAL_STEPS
            for _ in range(2):  # the first to know how many steps fill the time
                (found,) = _run(crew, trainers.alone, [(plan.work, plan.samples, num_steps, slowness)], ranks=[rank])
                rate = num_steps * plan.samples / found.seconds
                num_steps = max(_LEAST_STEPS, round(plan.seconds * rate / plan.samples))
            rates.append(rate)
    return rates


def _at_once(plan: Plan, alone: Sequence[float], by_quota: bool) -> float:
    """The sum over workers that do not know of each other: what this machine can do with all of them busy."""
    slowness = [1.0 if by_quota else 1.0 / speed for speed in plan.speeds]
    num_steps = [max(_LEAST_STEPS, round(plan.seconds * rate / plan.samples)) for rate in alone]
    with _workers(plan, by_quota) as (crew, _):
        own = [(plan.work, plan.samples, num, slow) for num, slow in zip(num_steps, slowness, strict=True)]
        found = _run(crew, trainers.alone, own)
    return sum(worker.num_steps * plan.samples / worker.seconds for worker in found)


def _together(plan: Plan, contender: str, expected: float, by_quota: bool) -> tuple[float, list[list[int]]]:
    """Samples a second of all, and the shares of each in every step."""
    slowness = [1.0 if by_quota else 1.0 / speed for speed in plan.speeds]
    pace = expected if contender == AUTO else len(plan.speeds) * min(plan.speeds) / sum(plan.speeds) * expected
    num_steps = max(_LEAST_STEPS, round(plan.seconds * pace / plan.total))
    with _workers(plan, by_quota) as (crew, _), tempfile.TemporaryDirectory() as folder:
        if contender == DDP:
            own = [
                (f"{folder}/store", rank, crew.size, plan.work, plan.samples, num_steps, slowness[rank])
                for rank in range(crew.size)
            ]
            found = _run(crew, trainers.with_ddp, own)
        else:
            settings = RunSettings(wanted=crew.size, shares=(1,) if contender == EQUAL else ())
            with coordinator(Path(folder), settings) as ticket:
                found = _run(
                    crew, trainers.with_session, [(ticket, plan.work, plan.total, num_steps, [s]) for s in slowness]
                )
    seconds = max(worker.seconds for worker in found)
    return num_steps * plan.total / seconds, [worker.shares for worker in found]


def _changing(plan: Plan, expected: float, by_quota: bool) -> tuple[float, list[int]]:
    """What part of the sum of all alone is done while speeds move from worker to worker, and how soon shares follow."""
    size, every = len(plan.speeds), plan.change_every
    courses = [[plan.speeds[(rank + part) % size] for part in range(size)] for rank in range(size)]
    num_steps = every * (plan.num_changes + 1)
    with (
        _workers(plan, by_quota) as (crew, quotas),
        tempfile.TemporaryDirectory() as folder,
        coordinator(Path(folder), RunSettings(wanted=size)) as ticket,
    ):
        for rank, course in enumerate(courses):
            slowness = [1.0] if by_quota else [1.0 / speed for speed in course]
            own = (ticket, plan.work, plan.total, num_steps, slowness, every, rank == 0)
            crew.start(trainers.with_session, *own, ranks=[rank])
        for change in range(1, plan.num_changes + 1):
            crew.hear(0, timeout_s=TIMEOUT_S)
            for quota, course in zip(quotas, courses, strict=False):
                quota.limit(_limit(course[change % size]))
        found = crew.finish(timeout_s=TIMEOUT_S)
    seconds = max(worker.seconds for worker in found)
    part = num_steps * plan.total / seconds / expected
    relief = [steps for change in range(1, plan.num_changes + 1) for steps in _relief(found, courses, change, every)]
    return part, relief


def _relief(found: Sequence[Trained], courses: Sequence[Sequence[float]], change: int, every: int) -> list[int]:
    """Of each worker that became slower: the steps from there on to the last one with its old share."""
    begins, size, steps = NUM_WARM + change * every, len(courses), []
    for worker, course in zip(found, courses, strict=True):
        if course[change % size] >= course[(change - 1) % size]:
            continue
        before = worker.shares[begins - 1]
        after = worker.shares[begins : begins + every]
        steps.append(next((n for n, share in enumerate(after) if share <= _RELIEVED * before), every))
    return steps


def _late_changes(shares: Sequence[Sequence[int]]) -> int:
    steps = list(zip(*shares, strict=True))
    return sum(before != after for before, after in itertools.pairwise(steps[SETTLED:]))


# -- workers -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _workers(plan: Plan, by_quota: bool) -> Iterator[tuple[Crew, list[Quota]]]:
    with contextlib.ExitStack() as stack:
        quotas = [stack.enter_context(Quota()) for _ in plan.speeds] if by_quota else []
        crew = stack.enter_context(Crew(len(plan.speeds), form=False, timeout_s=TIMEOUT_S))
        for rank, quota in enumerate(quotas):
            quota.limit(_limit(plan.speeds[rank]))
            quota.add(crew.pid(rank))
        yield crew, quotas


def _run(
    crew: Crew,
    function: Callable[..., Trained],
    arguments: Sequence[tuple[Any, ...]],
    ranks: Sequence[int] | None = None,
) -> list[Trained]:
    """With arguments of its own for each worker."""
    chosen = range(crew.size) if ranks is None else ranks
    for rank, own in zip(chosen, arguments, strict=True):
        crew.start(function, *own, ranks=[rank])
    return crew.finish(chosen)


def _limit(speed: float) -> float | None:
    """One thread cannot use more than one core, but what runs beside it may."""
    return None if speed == 1.0 else speed
