"""What examples/ratings.py comes to on a file of ratings, alone and by each strategy: the held-out error must hardly
depend on it.

    python -m benchmarks.server_ratings --file u.data    MovieLens 100K, or a .inter file of RecBole

Without a file, on ratings that the example makes up.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Target

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ratings.py"
TIMEOUT_S = 1800.0

ALONE = "one process"
RUN = ("-m", "paceline", "run", "-n", "2", "--plain")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    ALONE: ((), ()),
    "all-reduce": (RUN, ()),
    "server, sync": ((*RUN, "--servers", "2"), ("--strategy", "server")),
    "server, bounded:4": ((*RUN, "--servers", "2"), ("--strategy", "server", "--consistency", "bounded:4")),
    "server, async": ((*RUN, "--servers", "2"), ("--strategy", "server", "--consistency", "async")),
    "hybrid": ((*RUN, "--servers", "2"), ("--strategy", "hybrid")),
}


def error_of(way: str, file: Path | None, epochs: int) -> float:
    """The held-out RMSE after the last epoch."""
    launcher, options = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        data = ["--file", str(file.resolve())] if file else []
        command = [sys.executable, *launcher, str(EXAMPLE), *data, "--epochs", str(epochs), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
    found = re.findall(r"held-out RMSE ([0-9.]+)", done.stdout)
    if done.returncode or len(found) != epochs:
        raise SystemExit(f"{way}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[-1])


def measure(options: argparse.Namespace) -> Found:
    errors = {way: error_of(way, options.file, options.epochs) for way in options.ways}
    first = errors[ALONE]
    name = options.file.name if options.file else "made up"
    table = Table("", "held-out RMSE", "of one process", title=f"{name}, {options.epochs} epochs")
    for way, error in errors.items():
        table.add_row(way, f"{error:.4f}", f"{error / first:.4f}")
    return Found({"file": name, "epochs": options.epochs, "rmse": errors}, [table])


def largest_difference(record: dict[str, Any]) -> float:
    return max(abs(float(error) / float(record["rmse"][ALONE]) - 1) for error in record["rmse"].values())


BENCHMARK = Benchmark(
    __doc__,
    "server-ratings",
    measure,
    targets=[Target("relative difference of the error, any way", "one process", largest_difference, at_most=0.002)],
    options=[
        Option("--file", None, quick=None, help="of ratings: user, item and rating, separated by tabs"),
        Option("--epochs", 8, quick=1),
        Option("--ways", list(WAYS), quick=[ALONE, "hybrid"], choices=list(WAYS)),
    ],
    # Figures of ratings that were made up do not take the place of those of a real file.
    result=lambda options: "server-ratings" if options.file else "server-ratings-made-up",
    check=lambda options: "" if ALONE in options.ways else f"--ways: what all are compared with is missing, {ALONE!r}",
)


if __name__ == "__main__":
    BENCHMARK.main()
