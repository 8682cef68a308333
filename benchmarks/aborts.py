"""How soon `abort` ends a wait: on the member that calls it, and on the others.

Times are from just before `abort` to the moment of the
exception; rank 0 calls it from another thread, every rank but the last waits in an all-reduce that the last never
joins.
"""

from __future__ import annotations

import argparse
import threading
import time
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, with_worst
from paceline.collective import Group
from paceline.errors import GroupAborted
from paceline.testing.crew import Crew

LAYOUTS = (("aaaa", "direct"), ("abcd", "ring"), ("abcd", "tree"), ("aabb", "hierarchical"))


def wait_for_abort(group: Group, algorithm: str) -> Any:
    """When abort was called (on rank 0), and when this rank's wait ended."""
    called: list[float] = []

    def abort() -> None:
        called.append(time.monotonic())
        group.abort("measured")

    group.barrier()
    if group.rank == group.size - 1:
        time.sleep(1.0)
        return None
    if group.rank == 0:
        threading.Timer(0.4, abort).start()
    try:
        group.all_reduce(torch.zeros(1000), algorithm=algorithm)
    except GroupAborted:
        return called, time.monotonic()
    raise AssertionError("an all-reduce without all members was completed")


def one_abort(layout: str, algorithm: str) -> tuple[float, float]:
    """Milliseconds here, and on the slowest of the others."""
    with Crew(4, hosts=layout) as crew:
        (called, first), *others = crew.run(wait_for_abort, algorithm)[:3]
    return (first - called[0]) * 1e3, (max(ended for _, ended in others) - called[0]) * 1e3


def measure(options: argparse.Namespace) -> Found:
    table = Table("hosts", "algorithm", "here, ms (highest)", "on the others, ms (highest)", title="abort")
    rows = []
    for layout, algorithm in LAYOUTS:
        here, elsewhere = zip(*(one_abort(layout, algorithm) for _ in range(options.aborts)), strict=True)
        table.add_row(layout, algorithm, with_worst(here, ".2f"), with_worst(elsewhere, ".2f"))
        rows.append({"hosts": layout, "algorithm": algorithm, "here_ms": here, "elsewhere_ms": elsewhere})
    return Found({"rows": rows}, [table])


BENCHMARK = Benchmark(
    __doc__,
    "aborts",
    measure,
    targets=[
        Target(
            "ms until the last wait has ended, the longest of all",
            "what the README says",
            lambda record: max(max(row["elsewhere_ms"] + row["here_ms"]) for row in record["rows"]),
            at_most=2.0,
        )
    ],
    options=[Option("--aborts", 8, quick=1, help="for each layout")],
)


if __name__ == "__main__":
    BENCHMARK.main()
