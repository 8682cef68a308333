"""What limits a step, and what can be done about it: pure, from what each worker does in one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from paceline.cli.bench.steps.analysis import WAITING, StepAnalysis, WorkerTimes, mean

Facts = Mapping[str, str | int | bool]


class StepFinding(NamedTuple):
    """`part` of a step, and what there is to say of it."""

    part: float
    text: str


class _Rule(NamedTuple):
    """These kinds are worth a word if together they take as much as `least` of a step."""

    kinds: tuple[str, ...]
    least: float
    says: Callable[[str, StepAnalysis], str]


def find(analysis: StepAnalysis, cores: int) -> list[StepFinding]:
    """The greatest first; `cores` are those that all workers share."""
    found = [*_waiting(analysis), *_by_rule(analysis), *_computing(analysis, cores)]
    return sorted(found, key=lambda finding: -finding.part)


def _waiting(analysis: StepAnalysis) -> Iterator[StepFinding]:
    by_number = {times.worker: times for times in analysis.workers}
    for times in analysis.workers:
        for other, seconds in times.awaited.items():
            part = seconds / times.step_s
            if part >= 0.1:
                why = _slower_in(by_number[other], times)
                yield StepFinding(part, f"worker {times.worker} waits {part:.0%} of a step for worker {other}{why}")


def _slower_in(late: WorkerTimes, early: WorkerTimes) -> str:
    """What the one that is waited for takes longer at."""
    kinds = [kind for kind in late.by_kind if kind != WAITING]
    longer = {kind: late.by_kind[kind] - early.by_kind.get(kind, 0.0) for kind in kinds}
    kind = max(longer, key=lambda kind: longer[kind])
    if longer[kind] <= 0.2 * early.by_kind.get(WAITING, 0.0):
        return ": now one of them is late, now the other, because the machine is busy or steps differ"
    found = f", which takes {longer[kind] * 1e3:.2f} ms longer for {kind}"
    if kind not in ("forward", "backward", "data"):
        return found
    return f"{found}; batches are divided by speed after the first steps (--shares auto): look at later ones (--skip)"


def _by_rule(analysis: StepAnalysis) -> Iterator[StepFinding]:
    for rule in _RULES:
        part = mean(times.part(*rule.kinds) for times in analysis.workers)
        if part >= rule.least:
            yield StepFinding(part, rule.says(f"{part:.0%} of a step", analysis))


def _computing(analysis: StepAnalysis, cores: int) -> Iterator[StepFinding]:
    part = mean(times.part("forward", "backward") for times in analysis.workers)
    if part < 0.5:
        return
    text = f"forward and backward take {part:.0%} of a step"
    threads = int(analysis.facts["threads"]) * len(analysis.workers)
    if threads > cores:
        text += f"; {threads} threads of all workers share {cores} cores: use fewer workers, or fewer threads each"
    yield StepFinding(part, text)


def _data(part: str, analysis: StepAnalysis) -> str:
    workers = int(analysis.facts["loader_workers"])
    remedy = f"num_workers={2 * workers or 2}"
    return f"the batch takes {part}; loader=LoaderOptions({remedy}) collates it while the step before is computed"


def _optimizer(part: str, analysis: StepAnalysis) -> str:
    names = str(analysis.facts["optimizers"])
    remedy = f"; {names}(..., fused=True) does it in one pass over memory" if analysis.facts["can_be_fused"] else ""
    return f"the optimizer takes {part}{remedy}"


def _reduce(part: str, analysis: StepAnalysis) -> str:
    megabytes = int(analysis.facts["parameter_bytes"]) / 1e6
    return (
        f"reducing {megabytes:.3g} MB of gradients takes {part} beside the waiting; a larger global_batch needs fewer "
        "steps for the same samples"
    )


def _servers(part: str, analysis: StepAnalysis) -> str:
    instead = "" if analysis.facts["is_leased"] else ", and consistency='async' does not wait for the others"
    return f"servers take {part}; more of them divide the work (--servers){instead}"


def _leases(part: str, _: StepAnalysis) -> str:
    return f"waiting for leases takes {part}: there are too few for so many workers, or the epoch ends"


def _statistics(part: str, _: StepAnalysis) -> str:
    return f"batch_norm='sync' takes {part}: two exchanges for each layer; GroupNorm needs none"


def _session(part: str, analysis: StepAnalysis) -> str:
    step_ms = mean(times.step_s for times in analysis.workers) * 1e3
    return f"Paceline itself takes {part} of {step_ms:.2f} ms; with a larger global_batch it matters less"


def _copy(part: str, _: StepAnalysis) -> str:
    return f"copying gradients to where they are reduced takes {part}; a larger global_batch has fewer of them"


def _script(part: str, _: StepAnalysis) -> str:
    return f"the body of the loop, around session.step, takes {part}; print, log and compute there less often"


_RULES = (
    _Rule(("data",), 0.1, _data),
    _Rule(("optimizer",), 0.2, _optimizer),
    _Rule(("reduce", "header"), 0.2, _reduce),
    _Rule(("servers",), 0.2, _servers),
    _Rule(("leases",), 0.1, _leases),
    _Rule(("statistics",), 0.1, _statistics),
    _Rule(("session",), 0.1, _session),
    _Rule(("copy",), 0.1, _copy),
    _Rule(("script",), 0.1, _script),
)
