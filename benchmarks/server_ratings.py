"""What examples/ratings.py comes to on a file of ratings, alone and by each strategy: the held-out error must hardly
depend on it.

    python benchmarks/server_ratings.py u.data          MovieLens 100K, or a .inter file of RecBole

Prints a table, keeps benchmarks/results/server-ratings.json.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine

RESULTS = Path(__file__).parent / "results" / "server-ratings.json"
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ratings.py"
TIMEOUT_S = 1800.0

RUN = ("-m", "paceline", "run", "-n", "2", "--plain")
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one process": ((), ()),
    "all-reduce": (RUN, ()),
    "server, sync": ((*RUN, "--servers", "2"), ("--strategy", "server")),
    "server, bounded:4": ((*RUN, "--servers", "2"), ("--strategy", "server", "--consistency", "bounded:4")),
    "server, async": ((*RUN, "--servers", "2"), ("--strategy", "server", "--consistency", "async")),
    "hybrid": ((*RUN, "--servers", "2"), ("--strategy", "hybrid")),
}


def error_of(way: str, file: Path, epochs: int) -> float:
    """The held-out RMSE after the last epoch."""
    launcher, options = WAYS[way]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *launcher, str(EXAMPLE), "--file", str(file), "--epochs", str(epochs), *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=folder)
    found = re.findall(r"held-out RMSE ([0-9.]+)", done.stdout)
    if done.returncode or len(found) != epochs:
        raise SystemExit(f"{way}: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    errors = {way: error_of(way, options.file.resolve(), options.epochs) for way in WAYS}
    first = errors["one process"]
    table = Table("", "held-out RMSE", "of one process", title=f"{options.file.name}, {options.epochs} epochs")
    for way, error in errors.items():
        table.add_row(way, f"{error:.4f}", f"{error / first:.4f}")
    Console(width=120).print(table)
    record = {"machine": machine.describe(), "file": options.file.name, "epochs": options.epochs, "rmse": errors}
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
