"""A parameter server with workers that only push and pull, beside others' on the same work: torch.distributed.rpc, a
Ray actor, and Redis as a store of rows (which adds nothing up).

Contenders take turns with fresh processes; a figure is the median over rounds, of all workers together.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, ratio, spread
from benchmarks.server import measure as measuring
from benchmarks.server.measure import Results
from benchmarks.server.plan import CONTENDERS, DENSE, PACELINE, RAY, REDIS, RPC, SPARSE, Plan

SIZES = {DENSE: 25_000_000, SPARSE: 10_000_000}


def measure(options: argparse.Namespace) -> Found:
    plan = Plan(
        work=options.work,
        size=options.size or SIZES[options.work],
        num_workers=options.workers,
        num_rounds=options.rounds,
        seconds=options.seconds,
        contenders=tuple(name for name in CONTENDERS[options.work] if name in (PACELINE, *options.against)),
        dim=options.dim,
        batch=options.batch,
    )
    results = measuring.run(plan)
    return Found(record_of(plan, results), [tabulate(plan, results)])


def tabulate(plan: Plan, results: Results) -> Table:
    what = (
        f"{plan.size:,} parameters" if plan.work == DENSE else f"{plan.batch:,} ids of {plan.size:,} rows of {plan.dim}"
    )
    title = f"{what}, 1 server, {plan.num_workers} workers, {plan.unit} of all, medians of {plan.num_rounds} rounds"
    columns = [f"{measure} (lowest-highest)" for measure in plan.measures]
    table = Table("", *columns, *[f"Paceline / this, {measure}" for measure in plan.measures], title=title)
    for name, figures in results.figures.items():
        shown = [spread(figures[measure]) for measure in plan.measures]
        table.add_row(name, *shown, *[f"{times:.2f}" for times in ratios(plan, results, name).values()])
    if results.memcpy:
        table.add_row("copying them once, one core", spread(results.memcpy))
    return table


def ratios(plan: Plan, results: Results, name: str) -> dict[str, float]:
    """How many times what another one does Paceline does, in the same rounds."""
    ours, theirs = results.figures[PACELINE], results.figures[name]
    return {measure: ratio(ours[measure], theirs[measure]) for measure in plan.measures}


def record_of(plan: Plan, results: Results) -> dict[str, Any]:
    return {
        "work": plan.work,
        "size": plan.size,
        "dim": plan.dim,
        "batch": plan.batch,
        "workers": plan.num_workers,
        "unit": plan.unit,
        "figures": results.figures,
        "paceline_over": {name: ratios(plan, results, name) for name in results.figures},
        "memcpy": results.memcpy,
        "left_out": results.left_out,
    }


def over(peer: str, measure: str) -> Callable[[dict[str, Any]], float | None]:
    def figure(record: dict[str, Any]) -> float | None:
        return record["paceline_over"].get(peer, {}).get(measure)  # type: ignore[no-any-return]

    return figure


def check(options: argparse.Namespace) -> str:
    if options.size and options.size < 1000:
        return f"--size {options.size}: give 1000 or more"
    if options.rounds < 1 or options.workers < 1 or options.seconds <= 0:
        return "--rounds and --workers of 1 or more, --seconds above 0"
    return ""


BENCHMARK = Benchmark(
    __doc__,
    "server",
    measure,
    targets=[
        Target("dense, times as fast", "torch RPC", over(RPC, "push and pull"), at_least=2.0),
        Target("dense, times as fast", "a Ray actor", over(RAY, "push and pull"), at_least=1.5),
        Target("sparse pull, times as fast", "torch RPC", over(RPC, "pull"), at_least=5.0),
        Target("sparse push, times as fast", "torch RPC", over(RPC, "push"), at_least=5.0),
        Target("sparse pull, times as fast", "Redis", over(REDIS, "pull"), at_least=10.0),
        Target("sparse push, times as fast", "Redis", over(REDIS, "push"), at_least=5.0),
    ],
    options=[
        Option("--work", DENSE, quick=DENSE, choices=[DENSE, SPARSE], help="all parameters, or rows of a table"),
        Option("--size", 0, quick=20_000, help="parameters, or rows; 0 for 25 or 10 million"),
        Option("--dim", 16, quick=16, help="numbers in a row"),
        Option("--batch", 100_000, quick=1_000, help="ids of one pull or push"),
        Option("--workers", 2, quick=2, help="that ask the one server"),
        Option("--rounds", 5, quick=1),
        Option("--seconds", 3.0, quick=0.3, help="of each measurement"),
        Option("--against", [RPC, RAY, REDIS], quick=[RPC, RAY, REDIS], choices=[PACELINE, RPC, RAY, REDIS]),
    ],
    result=lambda options: f"server-{options.work}",
    check=check,
)
