"""What a group costs in memory: its shared memory beside the largest tensor, and whether anything grows over 10,000
operations.
"""

from __future__ import annotations

import argparse
import itertools
import os
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target
from paceline.collective import Group
from paceline.testing.crew import Crew

MB = 1 << 20


def shared_bytes(group: Group, num_bytes: int, in_arena: bool) -> int:
    """The shared memory of this member, its tensor included where that lies in it, after a few all-reduces."""
    tensor = group.empty((num_bytes // 4,)) if in_arena else torch.zeros(num_bytes // 4)
    for _ in range(9):
        group.all_reduce(tensor.zero_())
    return group.committed_bytes()


def growth(group: Group, num_operations: int) -> tuple[int, int, int]:
    """Over many operations: more open files, more shared memory, more resident memory (KiB)."""
    tensor, ordinary = group.empty((1000,)).zero_(), torch.zeros(100_000)
    before = (0, 0, 0)
    for count in range(num_operations):
        group.all_reduce(ordinary if count % 10 == 0 else tensor)
        if count == num_operations // 10:
            before = _footprint(group)
    after = _footprint(group)
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _footprint(group: Group) -> tuple[int, int, int]:
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return len(os.listdir("/proc/self/fd")), group.committed_bytes(), resident


def measure(options: argparse.Namespace) -> Found:
    rows: list[dict[str, Any]] = []
    table = Table("ranks on the host", "tensor", "shared memory a member / tensor", title="memory of a group")
    for ranks, megabytes, kind in itertools.product((2, 4), options.sizes, ("arena", "ordinary")):
        with Crew(ranks) as crew:
            largest = max(crew.run(shared_bytes, megabytes * MB, kind == "arena"))
        rows.append({"ranks": ranks, "tensor_bytes": megabytes * MB, "kind": kind, "shared_bytes": largest})
        table.add_row(str(ranks), f"{megabytes} MB, {kind}", f"{largest / (megabytes * MB):.2f}")
    lines = []
    for layout in ("aa", "ab"):
        with Crew(2, hosts=layout) as crew:
            grown = [max(values) for values in zip(*crew.run(growth, options.operations), strict=True)]
        rows.append({"hosts": layout, "operations": options.operations, "grown": grown})
        files, shared, resident = grown
        text = f"{files} open files, {shared} bytes shared, {resident} KiB resident"
        lines.append(f"hosts {layout}: growth over {options.operations * 9 // 10} operations: {text}")
    return Found({"rows": rows}, [table, *lines])


def slots_mib(record: dict[str, Any]) -> float:
    """The most that ordinary tensors need."""
    return max(float(row["shared_bytes"]) / MB for row in record["rows"] if row.get("kind") == "ordinary")


def grown(record: dict[str, Any]) -> float:
    return float(sum(sum(row["grown"][:2]) for row in record["rows"] if "grown" in row))


BENCHMARK = Benchmark(
    __doc__,
    "memory",
    measure,
    targets=[
        Target("MiB shared by a member for ordinary tensors", "8 MiB of slots and a page", slots_mib, at_most=8.1),
        Target("open files and shared bytes that grow with operations", "none", grown, at_most=0.0),
    ],
    options=[
        Option("--sizes", [1, 16, 100], quick=[1], help="of the tensor, MB"),
        Option("--operations", 10_000, quick=200),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
