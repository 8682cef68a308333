"""What a run gives a reader: tables and a JSON record."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from paceline.cli.bench.allreduce.measure import AllReduceResults
from paceline.cli.bench.allreduce.plan import PACELINE, AllReducePlan, Contender, format_size, num_iterations


@dataclass(frozen=True)
class Figure:
    """The median over rounds, with the lowest and the highest round."""

    median_ms: float
    lowest_ms: float
    highest_ms: float

    @classmethod
    def of(cls, rounds_ms: Sequence[float]) -> Figure:
        return cls(statistics.median(rounds_ms), min(rounds_ms), max(rounds_ms))

    def __str__(self) -> str:
        return f"{digits(self.median_ms)} ({digits(self.lowest_ms)}–{digits(self.highest_ms)})"  # noqa: RUF001


@dataclass(frozen=True)
class Ratio:
    """How many times faster a contender of Paceline is than a peer; below 1 it is slower."""

    contender: Contender
    peer: Contender
    num_bytes: int
    times_faster: float


def figures(results: AllReduceResults) -> dict[tuple[Contender, int], Figure]:
    return {key: Figure.of(rounds_ms) for key, rounds_ms in results.rounds_ms.items()}


def ratios(plan: AllReducePlan, results: AllReduceResults) -> list[Ratio]:
    figure = figures(results)
    ours = [contender for contender in plan.contenders if contender.library == PACELINE]
    peers = [contender for contender in plan.contenders if contender.library != PACELINE]
    return [
        Ratio(contender, peer, size, figure[peer, size].median_ms / figure[contender, size].median_ms)
        for contender in ours
        for peer in peers
        for size in plan.sizes
    ]


def tables(plan: AllReducePlan, results: AllReduceResults) -> list[Table]:
    """The times, and the ratios where Paceline met a peer."""
    figure = figures(results)
    title = f"float32 sum, {plan.num_ranks} ranks: ms, median of {plan.num_rounds} rounds (lowest to highest)"
    times = _table(title, plan)
    for contender in plan.contenders:
        times.add_row(contender.label, *(str(figure[contender, size]) for size in plan.sizes))
    faster = {(ratio.contender, ratio.peer, ratio.num_bytes): ratio for ratio in ratios(plan, results)}
    if not faster:
        return [times]
    comparison = _table("how many times faster Paceline is (below 1: slower)", plan)
    for contender, peer in dict.fromkeys((ours, peer) for ours, peer, _ in faster):
        cells = (digits(faster[contender, peer, size].times_faster) for size in plan.sizes)
        comparison.add_row(f"{contender.label} : {peer.label}", *cells)
    return [times, comparison]


def record(plan: AllReducePlan, results: AllReduceResults) -> dict[str, Any]:
    """All of it as plain values, for JSON."""
    figure = figures(results)
    return {
        "versions": results.versions,
        "settings": {
            "ranks": plan.num_ranks,
            "rounds": plan.num_rounds,
            "threads": plan.num_threads,
            "dtype": "float32",
            "operation": "sum",
            "time": "per operation from the last rank entering to the last leaving, median of iterations",
        },
        "results": [
            {
                "contender": contender.label,
                "library": contender.library,
                "algorithm": contender.algorithm,
                "tensors": contender.tensors,
                "num_bytes": size,
                "iterations": num_iterations(size),
                "rounds_ms": rounds_ms,
                "median_ms": figure[contender, size].median_ms,
                "lowest_ms": figure[contender, size].lowest_ms,
                "highest_ms": figure[contender, size].highest_ms,
            }
            for (contender, size), rounds_ms in results.rounds_ms.items()
        ],
        "ratios": [
            {
                "contender": ratio.contender.label,
                "peer": ratio.peer.label,
                "num_bytes": ratio.num_bytes,
                "times_faster": ratio.times_faster,
            }
            for ratio in ratios(plan, results)
        ],
    }


def _table(title: str, plan: AllReducePlan) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for size in plan.sizes:
        table.add_column(format_size(size), justify="right")
    return table


def digits(value: float) -> str:
    """Three digits that count, and never an exponent."""
    for limit, places in ((0.1, 4), (1.0, 3), (10.0, 2)):
        if value < limit:
            return f"{value:.{places}f}"
    return f"{value:.1f}"
