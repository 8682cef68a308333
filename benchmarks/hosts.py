"""Several hosts: how long after the death of a worker the others go on, and how soon its replacement takes part.

Prints a table, keeps benchmarks/results/hosts.json. Hosts are network namespaces of this machine (`netlab`), with TLS
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
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.cli.bench import machine
from paceline.control.coordinator_events import Settings
from paceline.control.reader import MemberRow
from paceline.testing.fleet import Fleet, Step
from paceline.testing.netlab import Netlab

RESULTS = Path(__file__).parent / "results" / "hosts.json"
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


def steps_since(fleet: Fleet, pid: int, since: float, size: int) -> list[Step]:
    return [step for step in fleet.steps_of(pid) if step.at > since and step.size == size]


def median_step(fleet: Fleet, pid: int) -> float:
    latest = fleet.steps_of(pid)[-SETTLED_STEPS:]
    return statistics.median(second.at - first.at for first, second in itertools.pairwise(latest))


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
    return max(ends) - began - Settings(wanted=1).silence_s


def measure(num_hosts: int, kills: int) -> dict[str, object]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=12, help="for each number of hosts")
    parser.add_argument("--hosts", default="2,3", help="numbers of hosts")
    options = parser.parse_args()
    table = Table(
        *("hosts", "step, ms", "kill, ms", "beyond a step, ms", "replaced, ms", "steps without it", "cut, beyond, s"),
        title="kill -9 of one worker: median (highest)",
    )
    rows = []
    for number in map(int, options.hosts.split(",")):
        row = measure(number, options.kills)
        kills = row["kills"]
        assert isinstance(kills, list)
        columns = {name: [kill[name] for kill in kills] for name in kills[0]}
        table.add_row(
            str(number),
            f"{statistics.median(columns['step_s']) * 1e3:.0f}",
            *(
                f"{statistics.median(columns[name]) * 1e3:.0f} ({max(columns[name]) * 1e3:.0f})"
                for name in ("kill_s", "beyond_s", "replaced_s")
            ),
            f"{statistics.median(columns['steps_without']):.0f} ({max(columns['steps_without']):.0f})",
            f"{row['cut_beyond_s']:.2f}",
        )
        rows.append(row)
    Console(width=120).print(table)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
