"""Workers of unequal speed together, beside the sum of what each does alone, and beside DDP on Gloo.

Two kinds of work: a small CNN, which all workers compute on the cores of this machine, slowed down by quotas of the
kernel (or by sleep, where there are none); and timed work, where a sample takes a millisecond in which nothing is
computed, as if each worker had a device of its own. In a part of its own, speeds move on by one worker every so many
steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, median, ratio, spread
from benchmarks.shares import measure as measuring
from benchmarks.shares.measure import SETTLED, Results
from benchmarks.shares.plan import ALONE, AUTO, CNN, DDP, EQUAL, TIMED, Plan


def measure(options: argparse.Namespace) -> Found:
    plan = Plan(
        work=options.work,
        speeds=tuple(options.speeds),
        samples=options.samples,
        num_rounds=options.rounds,
        seconds=options.seconds,
        change_every=options.change_every,
        num_changes=options.changes,
        against=(DDP,) if options.ddp else (),
    )
    results = measuring.run(plan)
    return Found(record_of(plan, results), tables_of(plan, results))


def tables_of(plan: Plan, results: Results) -> list[Table]:
    how = "a quota of the kernel" if results.by_quota else "sleep" if plan.work == CNN else "timed work"
    speeds = " : ".join(f"{speed:g}" for speed in plan.speeds)
    title = f"workers with speeds {speeds} by {how}, global batch {plan.total}, medians of {plan.num_rounds} rounds"
    table = Table("", "samples/s", "of the sum of each alone (lowest-highest)", title=title)
    sums = [sum(rates) for rates in results.alone]
    table.add_row(f"sum of {ALONE}", f"{median(sums):,.0f}", "1")
    for contender, parts in _parts(results).items():
        table.add_row(contender, f"{median(results.together[contender]):,.0f}", spread(parts, ".3f"))
    if results.changing:
        table.add_row(f"{AUTO}, speeds change every {plan.change_every} steps", "", spread(results.changing, ".3f"))
    return [table, _notes(plan, results)]


def record_of(plan: Plan, results: Results) -> dict[str, Any]:
    return {
        "work": plan.work,
        "speeds": plan.speeds,
        "global_batch": plan.total,
        "by_quota": results.by_quota,
        "samples_per_s_alone": results.alone,
        "samples_per_s": results.together,
        "of_sum_alone": {contender: median(parts) for contender, parts in _parts(results).items()},
        "auto_of_equal_shares": _auto_of_equal(results),
        "shares": results.shares,
        "late_changes": results.late_changes,
        "change_every": plan.change_every,
        "of_sum_alone_while_speeds_change": results.changing,
        "steps_before_relief": results.relief,
    }


def _parts(results: Results) -> dict[str, list[float]]:
    """What each contender did, as a part of the sum of all alone in the same round."""
    return {
        contender: [rate / sum(alone) for rate, alone in zip(rates, results.alone, strict=True)]
        for contender, rates in results.together.items()
    }


def _auto_of_equal(results: Results) -> float:
    return ratio(results.together[AUTO], results.together[EQUAL])


def _notes(plan: Plan, results: Results) -> Table:
    notes = Table.grid()
    listed = ", ".join(":".join(map(str, shares)) for shares in results.shares)
    notes.add_row(f"shares at the end of each round: {listed}")
    notes.add_row(f"changes of shares after the first {SETTLED} steps, by round: {results.late_changes}")
    notes.add_row(f"{AUTO} is {_auto_of_equal(results):.3f} times as fast as with equal shares")
    if results.relief:
        usual, most, times = median(results.relief), max(results.relief), len(results.relief)
        notes.add_row(
            f"steps before the share of a worker that slowed down follows: {usual:g}, at most {most} of {times}"
        )
    return notes


def of_alone(work: str, *, equal: bool = False) -> Callable[[dict[str, Any]], float | None]:
    """Of a run with that work, and with workers that are equal or not."""

    def figure(record: dict[str, Any]) -> float | None:
        if record["work"] != work or (len(set(record["speeds"])) == 1) is not equal:
            return None
        return float(record["auto_of_equal_shares"] if equal else record["of_sum_alone"][AUTO])

    return figure


def check(options: argparse.Namespace) -> str:
    if len(options.speeds) < 2 or not all(0.1 <= speed <= 1.0 for speed in options.speeds):
        return f"--speeds {options.speeds}: give a part of a core, 0.1 to 1, for each of two workers or more"
    if options.change_every and options.change_every < 50:
        return f"--change-every {options.change_every}: give 50 or more steps, or 0 to leave that part out"
    return ""


def result_name(options: argparse.Namespace) -> str:
    kind = "-timed" if options.work == TIMED else "-equal" if len(set(options.speeds)) == 1 else ""
    return f"shares{kind}"


BENCHMARK = Benchmark(
    __doc__,
    "shares",
    measure,
    targets=[
        Target("timed work, part of the sum of each alone", "equal shares allow 0.43", of_alone(TIMED), at_least=0.9),
        Target("CNN, part of the sum of each alone", "DDP on Gloo: 0.37 to 0.40", of_alone(CNN), at_least=0.7),
        Target("equal workers, times as fast", "equal shares", of_alone(CNN, equal=True), at_least=0.98),
    ],
    options=[
        Option("--work", CNN, quick=TIMED, choices=[CNN, TIMED]),
        Option("--speeds", [1.0, 0.5, 0.25], quick=[1.0, 0.5], help="of the workers; 1 is a whole core, or device"),
        Option("--samples", 64, quick=2, help="of each worker in a step, if all had the same"),
        Option("--rounds", 3, quick=1),
        Option("--seconds", 10.0, quick=0.5, help="of each measurement"),
        Option("--change-every", 200, quick=50, help="let speeds change every so many steps; 0 for never"),
        Option("--changes", 3, quick=1, help="how often they change"),
        Option("--ddp", True, quick=True, help="also DistributedDataParallel on Gloo"),
    ],
    result=result_name,
    check=check,
)
