"""Run simulated schedules of a whole run: `python -m paceline.testing.simulate --seeds 100000`, or one with `--seed N`.

All real machines together: coordinator, driver's choices, members, servers' members, leases, keepers. It prints what
was tried, by fault, mode and phase of the run. `--part control` and `--part servers` run the machines of the control
plane, or those of the server group, for themselves, with some faults more often.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter

from paceline.testing.joint import World as JointWorld
from paceline.testing.joint.world import MODES
from paceline.testing.serving import ServingWorld
from paceline.testing.simulation import Violation, World

PARTS = ("all", "control", "servers")
PHASES = ("gathering", "starting", "running", "switching", "moving", "recovering", "headless", "ending")

Tried = Counter[tuple[str, str, str]]


def run_one(seed: int, *, part: str = "all") -> tuple[str, Tried]:
    """What was violated, or nothing; and what was tried."""
    tried: Tried = Counter()
    try:
        tried = run_world(seed, part)
    except Violation as violation:
        return f"seed {seed}: {violation}\n  {' '.join(violation.__notes__)}", tried
    except Exception:
        which = "" if part == "all" else f" --part {part}"
        replay = f"replay: python -m paceline.testing.simulate{which} --seed {seed}"
        return f"seed {seed}: {traceback.format_exc()}\n  {replay}", tried
    return "", tried


def run_world(seed: int, part: str) -> Tried:
    if part == "servers":
        ServingWorld(seed).run()
    elif part == "control":
        World(seed).run()
    else:
        world = JointWorld(seed)
        world.run()
        return world.faults.tried
    return Counter()


def run_many(first: int, count: int, part: str) -> int:
    failures = 0
    tried: Tried = Counter()
    began = time.monotonic()
    told = began
    run = functools.partial(run_one, part=part)
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for done, (text, more) in enumerate(pool.imap_unordered(run, range(first, first + count), chunksize=20), 1):
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
    parser.add_argument("--part", choices=PARTS, default="all", help="all machines together, or a part of them")
    options = parser.parse_args()
    if options.seed is not None:
        run_world(options.seed, options.part)
        print(f"seed {options.seed}: no violation")
        return 0
    return 1 if run_many(options.first, options.seeds, options.part) else 0


if __name__ == "__main__":
    sys.exit(main())
