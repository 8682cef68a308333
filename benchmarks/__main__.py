"""Runs all benchmarks, or those that are named, one after the other: python -m benchmarks [--quick] [NAME ...]

One that fails does not keep the others from being run; the exit code says whether any did.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.catalogue import RUNS, Run
from benchmarks.common import SKIPPED

ROOT = Path(__file__).resolve().parents[1]
QUICK_S, FULL_S = 180.0, 4 * 3600.0  # after which one is taken to hang
_LEAVE_S = 30.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({run.module for run in RUNS})
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="the smallest form of each; nothing is kept")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(names)):
        parser.error(f"there is no benchmark {unknown[0]!r}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen = [run for run in RUNS if run.module in (options.names or names) and (run.quick_too or not options.quick)]
    outcomes = [(run, *run_one(run, quick=options.quick)) for run in chosen]
    Console().print(tabulate(outcomes))
    sys.exit(any(code not in (0, SKIPPED) for _, code, _ in outcomes))


def run_one(run: Run, *, quick: bool) -> tuple[int, float]:
    """Its exit code, and how many seconds it took. -1 for one that was ended because it took too long."""
    print(f"== {run.title}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{run.module}", *run.arguments, *(["--quick"] if quick else [])]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(QUICK_S if quick else FULL_S)
    except subprocess.TimeoutExpired:
        print(f"{run.title} is ended: it took longer than {QUICK_S if quick else FULL_S:.0f} s", flush=True)
        code = -1
    finally:
        _end(process)
    return code, time.monotonic() - began


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and what it started: it gets time to clean up, what is left of its process group gets none."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def tabulate(outcomes: Sequence[tuple[Run, int, float]]) -> Table:
    table = Table("benchmark", "outcome", "s")
    for run, code, seconds in outcomes:
        outcome = {0: "done", SKIPPED: "skipped", -1: "FAILED: took too long"}.get(code, f"FAILED: exit code {code}")
        table.add_row(run.title, outcome, f"{seconds:.0f}")
    total = sum(seconds for *_, seconds in outcomes)
    table.add_row("all", "", f"{total:.0f}")
    return table


if __name__ == "__main__":
    main()
