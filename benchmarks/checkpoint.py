"""How long a snapshot blocks training, beside a plain copy of as many bytes.

Prints a table, keeps benchmarks/results/checkpoint.json. The state is that of a model of many layers with AdamW:
weights, two moments and a step for each. Rounds are interleaved: one copy from a flat tensor into another, one `take`.
The background writing of a snapshot is waited for before the next round, so that it does not compete with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from paceline.checkpoint import Contents, Keeper
from paceline.cli.bench import machine

MB = 1_000_000
RESULTS = Path(__file__).parent / "results" / "checkpoint.json"
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


def measure(num_bytes: int, num_rounds: int, folder: Path) -> tuple[list[float], list[float], int]:
    model, state = state_of(num_bytes)
    # Not zeros: those are one page of the kernel's, over and over, until they are written to.
    source, destination = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    copies, takes = [], []
    with Keeper(folder, keep_last=1) as keeper:
        for operation in range(num_rounds + 1):
            contents = Contents(run="bench", operation=operation, epoch=0, position=0, model=model, state=state)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    table = Table("state", "a copy, ms", "take blocks, ms", "take / copy", "snapshot memory", title="a snapshot")
    rows = []
    for size in (100 * MB, 300 * MB):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            copies, takes, memory_bytes = measure(size, options.rounds, Path(folder))
        copy_s, take_s = statistics.median(copies), statistics.median(takes)
        table.add_row(
            f"{size // MB} MB",
            f"{copy_s * 1e3:.1f}",
            f"{take_s * 1e3:.1f} (highest {max(takes) * 1e3:.1f})",
            f"{take_s / copy_s:.2f}",
            f"{memory_bytes / MB:.0f} MB",
        )
        rows.append({"state_bytes": size, "copy_s": copies, "take_s": takes, "snapshot_bytes": memory_bytes})
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
