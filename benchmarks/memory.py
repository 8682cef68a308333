"""What a group costs in memory: its shared memory beside the largest tensor, and whether anything grows over 10,000
operations.

Prints a table, keeps benchmarks/results/memory.json.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.collective import Group
from paceline.testing.crew import Crew

MB = 1 << 20
RESULTS = Path(__file__).parent / "results" / "memory.json"
NUM_OPERATIONS = 10_000


def shared_bytes(group: Group, num_bytes: int, in_arena: bool) -> int:
    """The shared memory of this member, its tensor included where that lies in it, after a few all-reduces."""
    tensor = group.empty((num_bytes // 4,)) if in_arena else torch.zeros(num_bytes // 4)
    for _ in range(9):
        group.all_reduce(tensor.zero_())
    return group.committed_bytes()


def growth(group: Group) -> tuple[int, int, int]:
    """Over many operations: more open files, more shared memory, more resident memory (KiB)."""
    tensor, ordinary = group.empty((1000,)).zero_(), torch.zeros(100_000)
    before = (0, 0, 0)
    for count in range(NUM_OPERATIONS):
        group.all_reduce(ordinary if count % 10 == 0 else tensor)
        if count == NUM_OPERATIONS // 10:
            before = _footprint(group)
    after = _footprint(group)
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


def _footprint(group: Group) -> tuple[int, int, int]:
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return len(os.listdir("/proc/self/fd")), group.committed_bytes(), resident


def main() -> None:
    rows: list[dict[str, Any]] = []
    table = Table("ranks on the host", "tensor", "shared memory a member / tensor", title="memory of a group")
    for ranks in (2, 4):
        for size in (MB, 16 * MB, 100 * MB):
            for in_arena in (True, False):
                with Crew(ranks) as crew:
                    largest = max(crew.run(shared_bytes, size, in_arena))
                kind = "arena" if in_arena else "ordinary"
                rows.append({"ranks": ranks, "tensor_bytes": size, "kind": kind, "shared_bytes": largest})
                table.add_row(str(ranks), f"{size // MB} MB, {kind}", f"{largest / size:.2f}")
    console = Console(width=120)
    console.print(table)
    for layout in ("aa", "ab"):
        with Crew(2, hosts=layout) as crew:
            grown = [max(values) for values in zip(*crew.run(growth), strict=True)]
        rows.append({"hosts": layout, "operations": NUM_OPERATIONS, "grown": grown})
        files, shared, resident = grown
        text = f"{files} open files, {shared} bytes shared, {resident} KiB resident"
        console.print(f"hosts {layout}: growth over {NUM_OPERATIONS * 9 // 10} operations: {text}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
