"""Tables and the JSON record of `paceline bench server`."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from paceline.cli.bench.server.measure import Results
from paceline.cli.bench.server.plan import DENSE, PACELINE, Plan


def tables(plan: Plan, results: Results) -> list[Table]:
    unit = "iterations/s" if plan.work == DENSE else "million rows/s"
    what = (
        f"{plan.size:,} parameters" if plan.work == DENSE else f"{plan.batch:,} ids of {plan.size:,} rows of {plan.dim}"
    )
    title = f"{what}, 1 server, {plan.num_workers} workers, {unit} of all workers, medians of {plan.num_rounds} rounds"
    columns = [f"{measure} (lowest-highest)" for measure in plan.measures]
    table = Table("", *columns, *[f"Paceline / this, {measure}" for measure in plan.measures], title=title)
    for name, figures in results.figures.items():
        shown = [_spread(figures[measure]) for measure in plan.measures]
        table.add_row(name, *shown, *[f"{ratio:.2f}" for ratio in _ratios(plan, results, name)])
    for name, reason in results.left_out.items():
        table.add_row(name, f"left out: {reason}")
    if results.memcpy:
        table.add_row("copying them once, one core", _spread(results.memcpy))
    return [table]


def record(plan: Plan, results: Results) -> dict[str, Any]:
    return {
        "work": plan.work,
        "size": plan.size,
        "dim": plan.dim,
        "batch": plan.batch,
        "workers": plan.num_workers,
        "unit": "iterations/s" if plan.work == DENSE else "million rows/s",
        "figures": results.figures,
        "paceline_over": {
            name: dict(zip(plan.measures, _ratios(plan, results, name), strict=True)) for name in results.figures
        },
        "memcpy": results.memcpy,
        "left_out": results.left_out,
    }


def _ratios(plan: Plan, results: Results, name: str) -> list[float]:
    ours, theirs = results.figures.get(PACELINE, {}), results.figures[name]
    return [
        statistics.median(ours[measure]) / statistics.median(theirs[measure]) if measure in ours else float("nan")
        for measure in plan.measures
    ]


def _spread(figures: list[float]) -> str:
    return f"{statistics.median(figures):.2f} ({min(figures):.2f}-{max(figures):.2f})"
