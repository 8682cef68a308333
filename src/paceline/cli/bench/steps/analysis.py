"""From the spans of all workers to what a step of each consists of.

A step of a worker begins where the body of its loop ended for the step before, and ends with its own: batch, forward,
backward, reduction, update, body. Where all workers step together, they meet in `MEETINGS`. Who came there before the
last one waited until that came, and for that one; what is left is the work of the meeting itself. All workers are on
one machine, so their clocks agree.

A tenth of the steps at each end, by duration, is left out: those with a checkpoint or an evaluation, say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from paceline.cli.bench.errors import BenchError
from paceline.watch.spans import SCRIPT, Recording

WAITING = "waiting"
MEETINGS = ("reduce", "header")
FEWEST_STEPS = 5
_LEFT_OUT = 10  # one of so many, at each end

Steps = TypeVar("Steps")


class StepPart(NamedTuple):
    """From `start` to `stop`, in nanoseconds; `awaited` is the worker that was waited for, else -1."""

    kind: str
    start: int
    stop: int
    awaited: int = -1

    @property
    def duration(self) -> int:
        return self.stop - self.start


class WorkerStep(NamedTuple):
    """One step of one worker; its parts follow one another."""

    worker: int
    number: int
    parts: tuple[StepPart, ...]

    @property
    def duration(self) -> int:
        return self.parts[-1].stop - self.parts[0].start


class WorkerTimes(NamedTuple):
    """Means over steps, in seconds: of a whole step, of each kind of part, and of the waiting for each other worker."""

    worker: int
    step_s: float
    by_kind: dict[str, float]
    awaited: dict[int, float]

    def part(self, *kinds: str) -> float:
        """What these come to, as a part of the step."""
        return sum(self.by_kind.get(kind, 0.0) for kind in kinds) / self.step_s


class StepAnalysis(NamedTuple):
    """`example` is a step of usual length, of all workers."""

    facts: Mapping[str, str | int | bool]
    workers: list[WorkerTimes]
    example: list[WorkerStep]
    num_steps: int


def analyse(recordings: Sequence[Recording]) -> StepAnalysis:
    """`BenchError` if there are too few steps."""
    facts = recordings[0].facts
    by_worker = [cut(recording) for recording in recordings]
    return _of_leases(facts, by_worker) if facts["is_leased"] else _of_steps(facts, by_worker)


def _of_steps(facts: Mapping[str, str | int | bool], by_worker: Sequence[Mapping[int, WorkerStep]]) -> StepAnalysis:
    """All workers do each step together."""
    common = set.intersection(*(set(steps) for steps in by_worker))
    _check_enough(len(common))
    rounds = [with_waiting([steps[number] for steps in by_worker]) for number in common]
    usual = _usual(rounds, lambda steps: max(step.duration for step in steps))
    workers = [_times([steps[place] for steps in usual]) for place in range(len(by_worker))]
    return StepAnalysis(facts, workers, usual[len(usual) // 2], len(usual))


def _of_leases(facts: Mapping[str, str | int | bool], by_worker: Sequence[Mapping[int, WorkerStep]]) -> StepAnalysis:
    """Each worker does leases of its own, and no two begin at the same time."""
    _check_enough(min(len(steps) for steps in by_worker))
    usual = [_usual(list(steps.values()), lambda step: step.duration) for steps in by_worker]
    first = usual[0][len(usual[0]) // 2]
    begin = first.parts[0].start
    others = [min(steps.values(), key=lambda step: abs(step.parts[0].start - begin)) for steps in by_worker[1:]]
    return StepAnalysis(facts, [_times(steps) for steps in usual], [first, *others], min(map(len, usual)))


def _check_enough(num_steps: int) -> None:
    if num_steps < FEWEST_STEPS:
        raise BenchError(
            f"only {num_steps} whole steps were recorded, at least {FEWEST_STEPS} are needed; let the script train "
            "longer, or skip fewer of its first steps (--skip)"
        )


def _usual(steps: list[Steps], duration: Callable[[Steps], int]) -> list[Steps]:
    """From the shortest to the longest, without both ends."""
    left_out = len(steps) // _LEFT_OUT
    return sorted(steps, key=duration)[left_out : len(steps) - left_out]


def cut(recording: Recording) -> dict[int, WorkerStep]:
    """The steps of a worker by number, without those that were computed twice, and those that are not whole."""
    found: dict[int, WorkerStep] = {}
    begun = dict[int, list[int]]()
    for index, number in recording.steps:
        begun.setdefault(index, []).append(number)
    numbers, first = [-1], -1  # the recording begins in the middle of a step
    for index, kind in enumerate(recording.kinds):
        numbers += begun.get(index, [])
        if kind == SCRIPT and numbers:
            if first >= 0 and len(numbers) == 1:
                parts = tuple(
                    StepPart(recording.kinds[k], recording.times[k], recording.times[k + 1])
                    for k in range(first, index + 1)
                )
                found[numbers[0]] = WorkerStep(recording.worker, numbers[0], parts)
            numbers, first = [], index + 1
    # The last body was cut off by the end of the recording.
    if found and first == len(recording.kinds):
        found.popitem()
    return found


def with_waiting(steps: Sequence[WorkerStep]) -> list[WorkerStep]:
    """One step of all workers, with the waiting taken out of the meetings."""
    parts = [list(step.parts) for step in steps]
    for kind in MEETINGS:
        places = [[place for place, part in enumerate(mine) if part.kind == kind] for mine in parts]
        if len({len(each) for each in places}) > 1:
            continue  # a step of which some did a part twice
        for meeting in reversed(list(zip(*places, strict=True))):
            _take_out(parts, meeting, [step.worker for step in steps])
    return [step._replace(parts=tuple(mine)) for step, mine in zip(steps, parts, strict=True)]


def _take_out(parts: list[list[StepPart]], meeting: Sequence[int], workers: Sequence[int]) -> None:
    """From the last place to the first, so that places before it stay what they are."""
    starts = [mine[place].start for mine, place in zip(parts, meeting, strict=True)]
    last = max(starts)
    awaited = workers[starts.index(last)]
    for mine, place in zip(parts, meeting, strict=True):
        part = mine[place]
        until = min(last, part.stop)
        if until > part.start:
            mine[place : place + 1] = [
                StepPart(WAITING, part.start, until, awaited),
                part._replace(start=until),
            ]


def _times(steps: Sequence[WorkerStep]) -> WorkerTimes:
    by_kind: dict[str, float] = {}
    awaited: dict[int, float] = {}
    for part in (part for step in steps for part in step.parts):
        seconds = part.duration / len(steps) / 1e9
        by_kind[part.kind] = by_kind.get(part.kind, 0.0) + seconds
        if part.awaited >= 0:
            awaited[part.awaited] = awaited.get(part.awaited, 0.0) + seconds
    return WorkerTimes(steps[0].worker, sum(by_kind.values()), by_kind, awaited)


def mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
