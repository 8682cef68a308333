"""Run simulated schedules: `python -m paceline.testing.simulate --seeds 100000`, or one again with `--seed N`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback

from paceline.testing.simulation import Violation, World


def run_one(seed: int) -> str:
    """Empty if all went well, else what was violated."""
    try:
        World(seed).run()
    except Violation as violation:
        return f"seed {seed}: {violation}\n  {' '.join(violation.__notes__)}"
    except Exception:
        return f"seed {seed}: {traceback.format_exc()}\n  replay: python -m paceline.testing.simulate --seed {seed}"
    return ""


def run_many(first: int, count: int) -> int:
    failures = 0
    began = time.monotonic()
    told = began
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for done, text in enumerate(pool.imap_unordered(run_one, range(first, first + count), chunksize=50), 1):
            if text:
                failures += 1
                print(text, flush=True)
            if time.monotonic() - told > 5 or done == count:
                told = time.monotonic()
                rate = done / (told - began)
                print(f"{done:,} of {count:,} schedules, {failures} failed, {rate:.0f}/s", file=sys.stderr, flush=True)
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one schedule, with the traceback of a violation")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many schedules to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    if options.seed is not None:
        World(options.seed).run()
        print(f"seed {options.seed}: no violation")
        return 0
    return 1 if run_many(options.first, options.seeds) else 0


if __name__ == "__main__":
    sys.exit(main())
