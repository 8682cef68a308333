"""Four processes compute together, one of them is killed, the others go on; then the speed beside Gloo.

python examples/collectives.py
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import torch

from paceline.collective import meeting
from paceline.errors import PeerLost

SIZE = 4
VICTIM = 2


def member(invitation: str, rank: int) -> None:
    torch.set_num_threads(1)
    with meeting.join(invitation, rank, SIZE) as group:
        gradient = group.empty((1_000_000,)).fill_(rank)  # lies in shared memory: reduced in place, without a copy
        group.all_reduce(gradient, "mean")
        if rank == 0:
            print(f"  {group.size} members: the mean of 0, 1, 2, 3 is {gradient[0]:g}", flush=True)
        began = time.perf_counter()
        try:
            group.barrier()  # in which a death may be seen already: the first to leave it is the one that dies
            if rank == VICTIM:
                print(f"  rank {rank} is killed in the middle of its work", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            began = time.perf_counter()
            while True:
                group.all_reduce(gradient, "mean")
        except PeerLost as lost:
            took_ms = (time.perf_counter() - began) * 1e3
            print(f"  rank {rank} knows after {took_ms:.1f} ms: member {lost.member}, rank {lost.rank}", flush=True)
            survivors = [other for other in range(SIZE) if other != lost.rank]
        with group.regroup(survivors) as following:
            total = torch.ones(1)
            following.all_reduce(total)
            if rank == 0:
                print(f"  a new group of {int(total)} works in the same processes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with Gloo")
    parser.add_argument("--sizes", default="1KB,1MB,16MB")
    options = parser.parse_args()
    print("Correct, and aware of who is there:", flush=True)
    context = multiprocessing.get_context("spawn")
    with meeting.Meeting(SIZE) as place:
        processes = [context.Process(target=member, args=(place.invitation, rank)) for rank in range(SIZE)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0 and rank != VICTIM]
    if failed:
        sys.exit(f"ranks {failed} failed")

    print("\nAnd fast (2 processes, one thread each, beside Gloo):", flush=True)
    bench = [sys.executable, "-m", "paceline.cli.main", "bench", "allreduce"]
    how_much = ["--rounds", str(options.rounds), "--sizes", options.sizes]
    sys.exit(subprocess.run([*bench, *how_much], check=False).returncode)


if __name__ == "__main__":
    main()
