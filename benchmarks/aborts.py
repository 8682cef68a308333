"""How soon `abort` ends a wait: on the member that calls it, and on the others.

Prints a table, keeps benchmarks/results/aborts.json. Times are from just before `abort` to the moment of the
exception; rank 0 calls it from another thread, every rank but the last waits in an all-reduce that the last never
joins.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.collective import Group
from paceline.errors import GroupAborted
from paceline.testing.crew import Crew

RESULTS = Path(__file__).parent / "results" / "aborts.json"
NUM_ABORTS = 8


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


def main() -> None:
    table = Table("hosts", "algorithm", "here, ms", "on the others, ms", title="abort")
    rows = []
    for layout, algorithm in (("aaaa", "direct"), ("abcd", "ring"), ("abcd", "tree"), ("aabb", "hierarchical")):
        here, elsewhere = [], []
        for _ in range(NUM_ABORTS):
            with Crew(4, hosts=layout) as crew:
                (called, first), *others = crew.run(wait_for_abort, algorithm)[:3]
            here.append((first - called[0]) * 1e3)
            elsewhere.append((max(ended for _, ended in others) - called[0]) * 1e3)
        cells = [f"{statistics.median(found):.2f} (highest {max(found):.2f})" for found in (here, elsewhere)]
        table.add_row(layout, algorithm, *cells)
        rows.append({"hosts": layout, "algorithm": algorithm, "here_ms": here, "elsewhere_ms": elsewhere})
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
