"""How fast the rows of a sparse table are found, pulled and pushed on one core, and what they cost in memory.

The first table: keys a second that the index of a table finds, beside a
dict and `torch.searchsorted`, in one interleaved run with new keys in every round, drawn evenly or by Zipf's law. The
second: a table of as many rows of 16 float32 with row-wise Adagrad, pulled and pushed with batches of unique ids.
Figures are medians. Give it a core of its own: taskset -c 1 python -m benchmarks.index
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target, median
from paceline.server.index import KeyIndex
from paceline.server.row_optimizers import Hyper
from paceline.server.rows import RowTable
from paceline.server.spec import TableSpec

Find = Callable[[torch.Tensor], torch.Tensor]

ZIPF = 1.05
DIM = 16


def positions(law: str, num: int, num_keys: int) -> torch.Tensor:
    """Which keys a batch asks for."""
    if law == "uniform":
        return torch.randint(0, num_keys, (num,))
    # The inverse of the distribution, taken as continuous.
    drawn = torch.rand(num, dtype=torch.float64)
    ranks: torch.Tensor = (1 - drawn * (1 - num_keys ** (1 - ZIPF))) ** (1 / (1 - ZIPF))
    return (ranks.long() - 1).clamp(0, num_keys - 1)


def finders(keys: torch.Tensor) -> dict[str, Find]:
    index = KeyIndex()
    index.add(keys)
    slots = {key: slot for slot, key in enumerate(keys.tolist())}
    ordered, order = torch.sort(keys)

    def in_dict(wanted: torch.Tensor) -> torch.Tensor:
        return torch.tensor([slots.get(key, -1) for key in wanted.tolist()])

    def in_sorted(wanted: torch.Tensor) -> torch.Tensor:
        places = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
        return torch.where(ordered[places] == wanted, order[places], -1)

    return {"KeyIndex": index.find, "dict": in_dict, "torch.searchsorted": in_sorted}


def find_rates(keys: torch.Tensor, sizes: list[int], num_rounds: int) -> list[dict[str, Any]]:
    cases = [(law, batch) for law in ("zipf", "uniform") for batch in sizes]
    methods = finders(keys)
    times: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(num_rounds):
        for law, batch in cases:
            for name, find in methods.items():
                asked = positions(law, batch, len(keys))
                wanted = keys[asked]
                began = time.perf_counter()
                found = find(wanted)
                times.setdefault((law, batch, name), []).append(time.perf_counter() - began)
                assert torch.equal(found, asked)
    return [
        {"law": law, "batch": batch, "method": name, "keys_per_s": batch / median(taken)}
        for (law, batch, name), taken in times.items()
    ]


def table_figures(keys: torch.Tensor, batch: int, num_rounds: int) -> dict[str, Any]:
    table = RowTable(TableSpec(name="bench", dim=DIM, optimizer="adagrad", rowwise=True))
    began = time.perf_counter()
    highest = 0.0
    for start in range(0, len(keys), 100_000):
        table.pull(keys[start : start + 100_000])
        if len(table) >= 1_000_000:
            highest = max(highest, table.num_bytes / table.row_bytes)
    build_s = time.perf_counter() - began
    pulls, pushes = [], []
    out = torch.empty(batch, DIM)
    for step in range(1, num_rounds + 1):
        chosen = keys[torch.randperm(len(keys))[: 2 * batch]]
        grads = torch.randn(batch, DIM)
        began = time.perf_counter()
        table.pull(chosen[:batch], out=out)
        pulled = time.perf_counter()
        # Not the rows just pulled: those would still be in the cache.
        table.push(chosen[batch:], grads, Hyper(lr=0.1), step)
        pushes.append(time.perf_counter() - pulled)
        pulls.append(pulled - began)
    return {
        "rows": len(table),
        "batch": batch,
        "pull_rows_per_s": batch / median(pulls),
        "push_rows_per_s": batch / median(pushes),
        "build_s": build_s,
        "bytes_to_row_bytes": table.num_bytes / table.row_bytes,
        "highest_bytes_to_row_bytes": highest,
    }


def measure(options: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    # As ids that somebody hashed; that two are equal would show as a wrong slot.
    keys = torch.randint(-(2**63), 2**63 - 1, (options.keys,))
    figures = table_figures(keys, options.batch, 3 * options.rounds)
    rates = find_rates(keys, options.finds, options.rounds)

    finding = Table("method", "ids", "batch", "million keys/s", title=f"finding keys among {options.keys:,}")
    for rate in sorted(rates, key=lambda rate: (rate["law"], -rate["batch"])):
        finding.add_row(rate["method"], rate["law"], f"{rate['batch']:,}", f"{rate['keys_per_s'] / 1e6:.1f}")
    rows = Table("rows", "batch", "pull, million rows/s", "push, million rows/s", "build, s")
    rows.add_column("bytes / row bytes (highest)")
    rows.add_row(
        f"{figures['rows']:,}",
        f"{figures['batch']:,}",
        f"{figures['pull_rows_per_s'] / 1e6:.1f}",
        f"{figures['push_rows_per_s'] / 1e6:.1f}",
        f"{figures['build_s']:.1f}",
        f"{figures['bytes_to_row_bytes']:.2f} ({figures['highest_bytes_to_row_bytes']:.2f})",
    )
    return Found({"find": rates, "table": figures}, [finding, rows])


def of_dict(record: dict[str, Any]) -> float:
    """The least of all laws and batches."""
    rates = {(rate["law"], rate["batch"], rate["method"]): rate["keys_per_s"] for rate in record["find"]}
    return min(float(rates[law, batch, "KeyIndex"] / rates[law, batch, "dict"]) for law, batch, _ in rates)


BENCHMARK = Benchmark(
    __doc__,
    "index",
    measure,
    targets=[
        Target("keys found a second, in times of it", "a dict; numba's open addressing has 19", of_dict, at_least=15.0)
    ],
    options=[
        Option("--keys", 10_000_000, quick=200_000),
        Option("--finds", [1_000_000, 100_000], quick=[10_000], help="keys to find at once"),
        Option("--batch", 37_500, quick=5_000, help="unique ids of a pull or push"),
        Option("--rounds", 9, quick=1),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
