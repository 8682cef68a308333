"""What a run gives a reader: tables, a JSON record and a plot of bandwidth over size."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from paceline.cli.bench.errors import BadInput
from paceline.cli.bench.measure import Results
from paceline.cli.bench.plan import PACELINE, Contender, Plan, format_size, num_iterations


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
        return f"{_digits(self.median_ms)} ({_digits(self.lowest_ms)}–{_digits(self.highest_ms)})"  # noqa: RUF001


@dataclass(frozen=True)
class Ratio:
    """How many times faster a contender of Paceline is than a peer; below 1 it is slower."""

    contender: Contender
    peer: Contender
    num_bytes: int
    times_faster: float


def figures(results: Results) -> dict[tuple[Contender, int], Figure]:
    return {key: Figure.of(rounds_ms) for key, rounds_ms in results.rounds_ms.items()}


def ratios(plan: Plan, results: Results) -> list[Ratio]:
    figure = figures(results)
    ours = [contender for contender in plan.contenders if contender.library == PACELINE]
    peers = [contender for contender in plan.contenders if contender.library != PACELINE]
    return [
        Ratio(contender, peer, size, figure[peer, size].median_ms / figure[contender, size].median_ms)
        for contender in ours
        for peer in peers
        for size in plan.sizes
    ]


def tables(plan: Plan, results: Results) -> list[Table]:
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
        cells = (_digits(faster[contender, peer, size].times_faster) for size in plan.sizes)
        comparison.add_row(f"{contender.label} : {peer.label}", *cells)
    return [times, comparison]


def record(plan: Plan, results: Results, *, machine: dict[str, str | int | float], command: str) -> dict[str, Any]:
    """All of it as plain values, for JSON."""
    figure = figures(results)
    return {
        "benchmark": "allreduce",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": machine,
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def check_can_plot(path: Path) -> None:
    """Raises `BadInput` if a plot cannot be drawn, so that nobody finds out after measuring."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadInput("--plot needs matplotlib: pip install 'paceline[bench]'") from error
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise BadInput(f"--plot {path}: the name must end in one of {', '.join(sorted(formats))}")


def write_plot(path: Path, plan: Plan, results: Results) -> None:
    from matplotlib.figure import Figure as Drawing

    drawing = Drawing(figsize=(8, 5), layout="constrained")
    axes = drawing.subplots()
    figure = figures(results)
    sizes = sorted(plan.sizes)
    for contender in plan.contenders:
        bandwidth = [size / figure[contender, size].median_ms / 1e6 for size in sizes]
        line = "-" if contender.library == PACELINE else "--"
        axes.plot(sizes, bandwidth, marker="o", linestyle=line, label=contender.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("size / time, GB/s")
    axes.set_title(f"All-reduce, float32 sum, {plan.num_ranks} ranks on one host")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    drawing.savefig(path)


def _table(title: str, plan: Plan) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for size in plan.sizes:
        table.add_column(format_size(size), justify="right")
    return table


def _digits(value: float) -> str:
    """Three digits that count, and never an exponent."""
    for limit, places in ((0.1, 4), (1.0, 3), (10.0, 2)):
        if value < limit:
            return f"{value:.{places}f}"
    return f"{value:.1f}"
