"""Float32 sum all-reduce on one host, beside Gloo, Open MPI and Intel MPI, in one interleaved run.

Times are from the last process in to the last out, the median of iterations, the median of rounds. "Arena" are tensors
from `group.empty`, "ordinary" ones any other. What is not installed is left out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.allreduce import peers
from benchmarks.common import Benchmark, Found, Option, Target, plots
from paceline.cli.bench.allreduce import plan as plans
from paceline.cli.bench.allreduce import report
from paceline.cli.bench.allreduce.command import measure_shown
from paceline.cli.bench.allreduce.libraries import OURS, BenchLibrary
from paceline.cli.bench.allreduce.measure import AllReduceResults
from paceline.cli.bench.errors import BadInput

MB = 1 << 20
ARENA = f"{plans.PACELINE} auto, arena"


def find_peers(names: Sequence[str]) -> list[BenchLibrary]:
    """Those that are here; a line for each that is not."""
    here = []
    for found in map(peers.find, names):
        if isinstance(found, BenchLibrary):
            here.append(found)
        else:
            print(f"{found.name} is left out, it is not installed; to compare: {found.remedy}", flush=True)
    return here


def plan_of(options: argparse.Namespace, others: Sequence[str]) -> plans.AllReducePlan:
    return plans.AllReducePlan(
        num_ranks=options.ranks,
        num_rounds=options.rounds,
        num_threads=options.threads,
        sizes=plans.parse_sizes(options.sizes),
        contenders=plans.contenders_of(options.algorithms, options.tensors, others),
    )


def measure(options: argparse.Namespace) -> Found:
    others = find_peers([name for name in options.against if name != plans.NONE])
    plan = plan_of(options, [library.name for library in others])
    results = measure_shown(plan, [OURS, *others])
    if options.plot:
        draw(options.json and options.json.with_suffix(".png"), plan, results)
    return Found(report.record(plan, results), report.tables(plan, results))


def draw(path: Path | None, plan: plans.AllReducePlan, results: AllReduceResults) -> None:
    """Bandwidth over size."""
    if (made := plots.drawing()) is None:
        return
    figure, axes = made
    medians = report.figures(results)
    sizes = sorted(plan.sizes)
    for contender in plan.contenders:
        bandwidth = [size / medians[contender, size].median_ms / 1e6 for size in sizes]
        line = "-" if contender.library == plans.PACELINE else "--"
        axes.plot(sizes, bandwidth, marker="o", linestyle=line, label=contender.label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [plans.format_size(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the tensor")
    axes.set_ylabel("size / time, GB/s")
    axes.set_title(f"All-reduce, float32 sum, {plan.num_ranks} ranks on one host")
    axes.grid(visible=True, alpha=0.3)
    plots.keep(figure, axes, path)


def times_faster(peer: str, from_bytes: int = 0) -> Callable[[dict[str, Any]], float | None]:
    """The least over sizes from there on, in the arena."""

    def figure(record: dict[str, Any]) -> float | None:
        found = [
            float(ratio["times_faster"])
            for ratio in record["ratios"]
            if (ratio["contender"], ratio["peer"]) == (ARENA, peer) and ratio["num_bytes"] >= from_bytes
        ]
        return min(found, default=None)

    return figure


def check(options: argparse.Namespace) -> str:
    try:
        plan_of(options, [])
    except BadInput as error:
        return str(error)
    return ""


BENCHMARK = Benchmark(
    __doc__,
    "allreduce",
    measure,
    targets=[
        Target("arena, every size, times faster", "Gloo", times_faster("gloo"), at_least=4.0),
        Target("arena, from 1 MB on, times faster", "Open MPI", times_faster("openmpi", MB), at_least=1.0),
        Target("arena, from 1 MB on, times faster", "Intel MPI", times_faster("impi", MB), at_least=1.0),
    ],
    options=[
        Option("--ranks", 2, quick=2, help="processes of each library"),
        Option("--sizes", plans.SIZES, quick="1KB,64KB", help="of the tensor; 1KB is 1024 bytes"),
        Option("--algorithms", ["auto"], quick=["auto"], choices=list(plans.ALGORITHMS), help="of Paceline"),
        Option("--tensors", list(plans.TENSORS), quick=list(plans.TENSORS), choices=list(plans.TENSORS)),
        Option("--against", list(peers.PEERS), quick=list(peers.PEERS), choices=[*peers.PEERS, plans.NONE]),
        Option("--rounds", 5, quick=1),
        Option("--threads", 1, quick=1, help="of each process"),
        Option("--plot", False, quick=False, help="draw bandwidth over size beside the figures"),
    ],
    result=lambda options: f"allreduce-{options.ranks}",
    check=check,
)
