"""How long a snapshot blocks training, beside a plain copy of as many bytes.

The state is that of a model of many layers with AdamW:
weights, two moments and a step for each. Rounds are interleaved: one copy from a flat tensor into another, one `take`.
The background writing of a snapshot is waited for before the next round, so that it does not compete with it.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, median
from paceline.checkpoint import CheckpointWriter, Contents

MB = 1_000_000
WIDTH = 512


def state_of(num_bytes: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Square layers with a bias each; a third of the bytes are weights."""
    num_layers = num_bytes // 3 // (WIDTH * (WIDTH + 1) * 4)
    model = {}
    for layer in range(num_layers):
        model[f"layers.{layer}.weight"] = torch.rand(WIDTH, WIDTH)
        model[f"layers.{layer}.bias"] = torch.rand(WIDTH)
    moments = {
        index: {"step": torch.tensor(1.0), "exp_avg": torch.rand_like(weight), "exp_avg_sq": torch.rand_like(weight)}
        for index, weight in enumerate(model.values())
    }
    return model, {"optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "params": list(moments)}]}}


def take_snapshots(num_bytes: int, num_rounds: int, folder: Path) -> tuple[list[float], list[float], int]:
    model, state = state_of(num_bytes)
    # Not zeros: those are one page of the kernel's, over and over, until they are written to.
    source, destination = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    copies, takes = [], []
    with CheckpointWriter(folder, keep_last=1) as keeper:
        for operation in range(num_rounds + 1):
            contents = Contents(
                run="bench", step=operation, operation=operation, epoch=0, position=0, model=model, state=state
            )
            if operation == 0:
                keeper.reserve(contents)
            began = time.perf_counter()
            destination.copy_(source)
            copied = time.perf_counter()
            pending = keeper.take(contents)
            taken = time.perf_counter()
            assert pending is not None
            keeper.settle(operation)
            pending.wait(120.0)
            copies.append(copied - began)
            takes.append(taken - copied)
        memory_bytes = keeper.buffer_bytes
    return copies[1:], takes[1:], memory_bytes


def measure(options: argparse.Namespace) -> Found:
    table = Table("state", "a copy, ms", "take blocks, ms", "take / copy", "snapshot memory", title="a snapshot")
    rows = []
    for megabytes in options.sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            copies, takes, memory_bytes = take_snapshots(megabytes * MB, options.rounds, Path(folder))
        copy_s, take_s = median(copies), median(takes)
        table.add_row(
            f"{megabytes} MB",
            f"{copy_s * 1e3:.1f}",
            f"{take_s * 1e3:.1f} (highest {max(takes) * 1e3:.1f})",
            f"{take_s / copy_s:.2f}",
            f"{memory_bytes / MB:.0f} MB",
        )
        rows.append(
            {"state_bytes": megabytes * MB, "copy_s": copies, "take_s": takes}
            | {"snapshot_bytes": memory_bytes, "take_of_copy": take_s / copy_s}
        )
    return Found({"rows": rows}, [table])


BENCHMARK = Benchmark(
    __doc__,
    "checkpoint",
    measure,
    targets=[
        Target(
            "how long a snapshot blocks, in times of a copy",
            "a plain copy of as many bytes",
            lambda record: float(max(row["take_of_copy"] for row in record["rows"])),
            at_most=2.0,
        )
    ],
    options=[
        Option("--sizes", [100, 300], quick=[10], help="of the state, MB"),
        Option("--rounds", 15, quick=1),
        Option("--folder", None, quick=None, help="where to write (default: a temporary folder)"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
