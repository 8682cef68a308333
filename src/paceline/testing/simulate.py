"""Run simulated schedules: `python -m paceline.testing.simulate --seeds 100000`, or one again with `--seed N`.

They are schedules of the control machines, or with `--servers` of those of the server group.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback

from paceline.testing.serving import ServingWorld
from paceline.testing.simulation import Violation, World


def run_one(seed: int, *, servers: bool = False) -> str:
    """Empty if all went well, else what was violated."""
    try:
        run_world(seed, servers)
    except Violation as violation:
        return f"seed {seed}: {violation}\n  {' '.join(violation.__notes__)}"
    except Exception:
        which = " --servers" if servers else ""
        replay = f"replay: python -m paceline.testing.simulate{which} --seed {seed}"
        return f"seed {seed}: {traceback.format_exc()}\n  {replay}"
    return ""


def run_world(seed: int, servers: bool) -> None:
    if servers:
        ServingWorld(seed).run()
    else:
        World(seed).run()


def run_many(first: int, count: int, servers: bool) -> int:
    failures = 0
    began = time.monotonic()
    told = began
    run = functools.partial(run_one, servers=servers)
    with multiprocessing.Pool(os.cpu_count()) as pool:
        for done, text in enumerate(pool.imap_unordered(run, range(first, first + count), chunksize=50), 1):
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
    parser.add_argument("--servers", action="store_true", help="schedules of the server group")
    options = parser.parse_args()
    if options.seed is not None:
        run_world(options.seed, options.servers)
        print(f"seed {options.seed}: no violation")
        return 0
    return 1 if run_many(options.first, options.seeds, options.servers) else 0


if __name__ == "__main__":
    sys.exit(main())
