"""The interleaved run: every contender at every size in every round, in an order that rotates."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.bench.allreduce.crew import RankCrew
from paceline.cli.bench.allreduce.libraries import BenchLibrary
from paceline.cli.bench.allreduce.messages import MeasureOrder, RankTimes
from paceline.cli.bench.allreduce.plan import FLOAT32_BYTES, NUM_WARMUPS, AllReducePlan, Contender, num_iterations


@dataclass(frozen=True)
class Measurement:
    """One measurement: the median of the iterations of one contender at one size."""

    round_index: int
    num_bytes: int
    contender: Contender


@dataclass(frozen=True)
class AllReduceResults:
    """The median of every round, in milliseconds, and what each library says of itself."""

    rounds_ms: dict[tuple[Contender, int], list[float]]
    versions: dict[str, str]


def measurement_order(plan: AllReducePlan) -> Iterator[Measurement]:
    """Contenders take turns at each size; who begins changes each round: the host's drift hits all alike."""
    for round_index in range(plan.num_rounds):
        first = round_index % len(plan.contenders)
        turn = plan.contenders[first:] + plan.contenders[:first]
        for num_bytes in plan.sizes:
            for contender in turn:
                yield Measurement(round_index, num_bytes, contender)


def last_in_to_last_out_ns(ranks: Sequence[RankTimes]) -> list[int]:
    """Per iteration, the time from the last rank going in to the last one coming out."""
    entered = zip(*(rank.entered_ns for rank in ranks), strict=True)
    left = zip(*(rank.left_ns for rank in ranks), strict=True)
    return [max(outs) - max(ins) for ins, outs in zip(entered, left, strict=True)]


def run(
    plan: AllReducePlan,
    libraries: Sequence[BenchLibrary],
    *,
    on_stage: Callable[[str], None] = lambda stage: None,
    on_step: Callable[[Measurement], None] = lambda step: None,
) -> AllReduceResults:
    """Measures all of `plan`. Whatever way it ends, no process and no file of it is left."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        crews = {
            library.name: stack.enter_context(
                RankCrew(library, num_ranks=plan.num_ranks, num_threads=plan.num_threads, folder=folder)
            )
            for library in libraries
        }
        for crew in crews.values():
            crew.start()
        for name, crew in crews.items():
            on_stage(f"starting {name}")
            crew.form()
        rounds_ms: dict[tuple[Contender, int], list[float]] = {
            (contender, num_bytes): [] for contender in plan.contenders for num_bytes in plan.sizes
        }
        for step in measurement_order(plan):
            on_step(step)
            ranks = crews[step.contender.library].measure(_order(step))
            median_ns = statistics.median(last_in_to_last_out_ns(ranks))
            rounds_ms[step.contender, step.num_bytes].append(median_ns / 1e6)
        return AllReduceResults(rounds_ms, {name: crew.version for name, crew in crews.items()})


def _order(step: Measurement) -> MeasureOrder:
    return MeasureOrder(
        num_elements=step.num_bytes // FLOAT32_BYTES,
        num_warmups=NUM_WARMUPS,
        num_iterations=num_iterations(step.num_bytes),
        algorithm=step.contender.algorithm,
        tensors=step.contender.tensors,
    )
