"""Several hosts: how long after the death of a worker the others go on, and how soon its replacement takes part.

Hosts are network namespaces of this machine (`netlab`), with TLS
between them; each has one worker, started by `paceline run` and `paceline join`. Every step sleeps for 20 ms and
reduces a small model, so what is measured is Paceline's part.

- kill: from just before kill -9 until the slowest survivor has committed a step without the dead one; beyond: minus
  the median step before.
- replaced: from the coordinator's word that the replacement is ready until it has committed its first step; steps:
  how many the others committed in between without it, the one under way included.
- cut: from pulling the cable of one host until the others have committed a step without it, minus the deadline of
  silence.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, Skipped, Target, median, with_worst
from benchmarks.common.fleet import Fleet, FleetStep
from paceline.control.journal.journal import MemberRow
from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing import netlab
from paceline.testing.netlab import Netlab

STEP_S = 0.02
SETTLED_STEPS = 25
MANY = ("--restarts", "1000")


def settle(fleet: Fleet, rows: list[MemberRow]) -> None:
    """Until all have done some steps together."""
    since = time.monotonic()

    def enough() -> bool:
        together = (steps_since(fleet, row.pid, since, len(rows)) for row in rows)
        return all(len(steps) >= SETTLED_STEPS for steps in together)

    fleet.wait_for(enough, "steady steps")


def steps_since(fleet: Fleet, pid: int, since: float, size: int) -> list[FleetStep]:
    return [step for step in fleet.steps_of(pid) if step.at > since and step.size == size]


def median_step(fleet: Fleet, pid: int) -> float:
    latest = fleet.steps_of(pid)[-SETTLED_STEPS:]
    return median(second.at - first.at for first, second in itertools.pairwise(latest))


def outage_s(fleet: Fleet, survivors: list[int], since: float) -> float:
    """Until the slowest of them has committed a step without whoever was lost."""

    def firsts() -> list[float]:
        each = [steps_since(fleet, pid, since, len(survivors)) for pid in survivors]
        return [steps[0].at for steps in each] if all(each) else []

    ends: list[float] = fleet.wait_for(firsts, "a step of the survivors")
    return max(ends) - since


def one_kill(fleet: Fleet, rank: int) -> dict[str, float]:
    rows = fleet.workers()
    settle(fleet, rows)
    step_s = max(median_step(fleet, row.pid) for row in rows)
    victim = rows[rank]
    survivors = [row.pid for row in rows if row is not victim]
    began = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    lost_s = outage_s(fleet, survivors, began)
    present = fleet.wait_for_workers(len(rows), without=[victim.pid])
    newcomer = next(row for row in present if row.pid not in survivors)
    to_monotonic = time.monotonic() - time.time()
    ready = newcomer.joined + to_monotonic
    first = fleet.steps_of(newcomer.pid)[0].at
    without = [step for step in fleet.steps_of(survivors[0]) if ready < step.at and step.size < len(rows)]
    return {
        "step_s": step_s,
        "kill_s": lost_s,
        "beyond_s": lost_s - step_s,
        "replaced_s": first - ready,
        "steps_without": float(len(without)),
    }


def one_cut(fleet: Fleet, lab: Netlab) -> float:
    """Beyond the deadline. The rank on the last host is unknown, so all who go on are looked for."""
    rows = fleet.workers()
    settle(fleet, rows)
    began = time.monotonic()
    lab.hosts[-1].cut()
    try:

        def firsts() -> list[float]:
            each = [steps_since(fleet, row.pid, began, len(rows) - 1) for row in rows]
            ends = [steps[0].at for steps in each if steps]
            return ends if len(ends) == len(rows) - 1 else []

        ends: list[float] = fleet.wait_for(firsts, "a step without the host that was cut off")
    finally:
        lab.hosts[-1].mend()
    return max(ends) - began - RunSettings(wanted=1).silence_s


def measure_hosts(num_hosts: int, kills: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        Netlab(num_hosts) as lab,
        Fleet.counting(lab.hosts, Path(folder), step_s=STEP_S) as fleet,
    ):
        fleet.run(1, *MANY)
        for number in range(1, num_hosts):
            fleet.wait_for_workers(number)
            fleet.join(number, 1, *MANY)
        fleet.wait_for_workers(num_hosts)
        found = [one_kill(fleet, number % num_hosts) for number in range(kills)]
        return {"hosts": num_hosts, "kills": found, "cut_beyond_s": one_cut(fleet, lab)}


def measure(options: argparse.Namespace) -> Found:
    if why := netlab.why_unavailable():
        raise Skipped(f"it needs hosts in network namespaces: {why}")
    table = Table(
        *("hosts", "step, ms", "kill, ms", "beyond a step, ms", "replaced, ms", "steps without it", "cut, beyond, s"),
        title="kill -9 of one worker: median (highest)",
    )
    rows = []
    for number in options.hosts:
        row = measure_hosts(number, options.kills)
        columns = {name: [kill[name] for kill in row["kills"]] for name in row["kills"][0]}
        times = (with_worst(columns[name], ".0f", 1e3) for name in ("kill_s", "beyond_s", "replaced_s"))
        table.add_row(
            *(str(number), f"{median(columns['step_s']) * 1e3:.0f}", *times),
            *(with_worst(columns["steps_without"], ".0f"), f"{row['cut_beyond_s']:.2f}"),
        )
        rows.append(row)
    return Found({"rows": rows}, [table])


BENCHMARK = Benchmark(
    __doc__,
    "hosts",
    measure,
    targets=[
        Target(
            "s beyond a step after a kill, the longest of all",
            "torchft tuned on one host: 0.10 with its step",
            lambda record: float(max(kill["beyond_s"] for row in record["rows"] for kill in row["kills"])),
            at_most=0.1,
        )
    ],
    options=[
        Option("--kills", 12, quick=1, help="for each number of hosts"),
        Option("--hosts", [2, 3], quick=[2], help="numbers of hosts"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
