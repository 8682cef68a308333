"""Run simulated schedules of a whole run: `python -m paceline.testing.simulate --seeds 100000`, or one with `--seed N`.

All real machines together: coordinator, driver's choices, members, servers' members, leases, keepers. It prints what
was tried, by fault, mode and phase of the run. `--processes 1` leaves the other cores alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter

from paceline.testing.joint import Violation, World
from paceline.testing.joint.world import MODES

PHASES = ("gathering", "starting", "running", "switching", "moving", "recovering", "headless", "ending")

Tried = Counter[tuple[str, str, str]]


def run_one(seed: int) -> tuple[str, Tried]:
    """What was violated, or nothing; and what was tried."""
    tried: Tried = Counter()
    try:
        world = World(seed)
        world.run()
        tried = world.faults.tried
    except Violation as violation:
        return f"seed {seed}: {violation}\n  {' '.join(violation.__notes__)}", tried
    except Exception:
        replay = f"replay: python -m paceline.testing.simulate --seed {seed}"
        return f"seed {seed}: {traceback.format_exc()}\n  {replay}", tried
    return "", tried


def run_many(first: int, count: int, processes: int) -> int:
    failures = 0
    tried: Tried = Counter()
    began = time.monotonic()
    told = began
    with multiprocessing.Pool(processes) as pool:
        for done, (text, more) in enumerate(pool.imap_unordered(run_one, range(first, first + count), chunksize=20), 1):
            tried += more
            if text:
                failures += 1
                print(text, flush=True)
            if time.monotonic() - told > 5 or done == count:
                told = time.monotonic()
                rate = done / (told - began)
                print(f"{done:,} of {count:,} schedules, {failures} failed, {rate:.0f}/s", file=sys.stderr, flush=True)
    if tried:
        print(table_of(tried))
    return failures


def table_of(tried: Tried) -> str:
    """How often each fault was tried in each mode and phase; what was never tried is a dot."""
    faults = sorted({fault for fault, _, _ in tried})
    lines = [f"{'fault':34}{'mode':11}" + "".join(f"{phase:>12}" for phase in PHASES)]
    for fault in faults:
        for mode in MODES:
            counts = [tried[(fault, mode, phase)] for phase in PHASES]
            if any(counts):
                cells = "".join(f"{count or '.':>12}" for count in counts)
                lines.append(f"{fault.replace('_', ' '):34}{mode:11}{cells}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one schedule, with the traceback of a violation")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many schedules to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many run at the same time")
    options = parser.parse_args()
    if options.seed is not None:
        World(options.seed).run()
        print(f"seed {options.seed}: no violation")
        return 0
    return 1 if run_many(options.first, options.seeds, options.processes) else 0


if __name__ == "__main__":
    sys.exit(main())
