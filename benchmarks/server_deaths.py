"""What kill -9 of a server costs where every parameter is on two of them, what bringing up another costs, what that
second copy costs, and how evenly a server that joins is loaded.

A model of a million dense parameters and a table of
100,000 rows of 16 is trained by two workers. Times are taken by the workers, after each step or lease.

- resumed: from just before the kill until every worker has done the second step or lease after it: the first may have
  been all but done. Beside it what two of them take at other times. A new server takes the place of the dead one
  before the next kill.
- stall: the longest time between two steps or leases of any worker, less the median of those times: after a kill until
  those that are left have two copies of everything again, and from the start of a new server, by an interpreter that
  has imported nothing yet, until it has its part.
- cost: steps or leases a second of both workers with one and with two copies, on two servers, in turns.
- join: to two servers of capacity 1 comes one of capacity 1, or of 2; the bytes or the rows that it holds in the end,
  beside what its capacity says.

No sample is lost or repeated in any of the runs: the audit of run.db is part of the measurement.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.table import Table
from torch import nn

import paceline
from benchmarks.common import Benchmark, Found, Option, Target, interleave, median, ratio, with_worst
from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.rehearsal import Rehearsal, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from paceline.watch.audit import audit

NUM_ROWS, DIM, BATCH, LENGTH = 100_000, 16, 64, 64_000
CONSISTENCIES = ("sync", "async")
WORKERS = 2
WARM_S = 2.0
TARGET_S = 1.0
STALL_S = 0.5


class Model(nn.Module):
    """With a table, or dense parameters alone."""

    def __init__(self, has_table: bool) -> None:
        super().__init__()
        self.rows = paceline.nn.Embedding(DIM) if has_table else _plain_rows
        self.dense = nn.Sequential(
            nn.Linear(4 * DIM, 1000), nn.ReLU(), nn.Linear(1000, 900), nn.ReLU(), nn.Linear(900, 1)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.dense(self.rows(ids).flatten(1))
        return found


def _plain_rows(ids: torch.Tensor) -> torch.Tensor:
    return (ids[..., None] % torch.arange(1, DIM + 1)).float()


class Ids(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.arange(number, number + 4) * 7919 % NUM_ROWS


def train(consistency: str, has_table: bool = True) -> None:
    """Until somebody ends it."""
    torch.manual_seed(0)
    model = Model(has_table)
    session = Session(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-3),
        data=Ids(),
        global_batch=BATCH,
        strategy="server",
        consistency=consistency,
        checkpoints=Checkpoints(every_s=None),
    )
    for epoch in session.epochs(10**6):
        for batch in epoch:
            session.step(lambda ids: model(ids).square().mean(), batch)
            say(time.monotonic())


@contextmanager
def running(consistency: str, servers: int, replicas: int, *, has_table: bool = True) -> Iterator[Rehearsal]:
    settings = RunSettings(wanted=WORKERS, servers=servers, replicas=replicas)
    with (
        tempfile.TemporaryDirectory() as folder,
        Rehearsal(train, consistency, has_table, workers=WORKERS, folder=Path(folder), settings=settings) as run,
    ):
        for number in range(WORKERS):
            run.wait_said(number, 20)
        run.wait_for(lambda: run.is_settled(range(servers)))
        yield run
        with run.reader() as reader:
            found = audit(reader.steps(), LENGTH, BATCH)
        # The last rows may be on their way; twice done would be seen.
        assert not any(epoch.twice or epoch.outside for epoch in found.epochs), found.details


def said_within(run: Rehearsal, number: int, begin: float, end: float) -> list[float]:
    return [at for at in run.said(number) if begin <= at < end]


# -- kills -------------------------------------------------------------------------------------------------------------


class Outages(NamedTuple):
    """Seconds until training goes on after each kill, what a step usually takes, and the longest step of any worker
    after each kill and while each new server was brought up."""

    resumed: list[float]
    usual: float
    killed: list[float]
    brought_up: list[float]

    def stalls(self, longest: list[float]) -> list[float]:
        return [max(0.0, one - self.usual) for one in longest]


def longest_step(run: Rehearsal, began: float) -> float:
    """Of any worker, from the last one before it began until now."""
    now = time.monotonic()
    found = []
    for number in range(WORKERS):
        said = run.said(number)
        since = max((at for at in said if at < began), default=began)
        found += [b - a for a, b in itertools.pairwise([since, *said_within(run, number, began, now), now])]
    return max(found)


def outages(consistency: str, count: int, seed: int) -> Outages:
    chance = random.Random(seed)
    found: list[float] = []
    killed: list[float] = []
    brought_up: list[float] = []
    with running(consistency, servers=3, replicas=2) as run:
        living = [0, 1, 2]
        for _ in range(count):
            time.sleep(chance.uniform(0.3, 0.6))
            victim = living.pop(chance.randrange(len(living)))
            began = time.monotonic()
            run.servers[victim].send(signal.SIGKILL)
            run.wait_for(lambda: all(len(said_within(run, n, began, 1e18)) >= 2 for n in range(WORKERS)))  # noqa: B023
            found.append(max(said_within(run, number, began, 1e18)[1] for number in range(WORKERS)) - began)
            run.wait_for(lambda: run.is_settled(living))
            killed.append(longest_step(run, began))
            began = time.monotonic()
            run.add_server(cold=True)
            living.append(len(run.servers) - 1)
            run.wait_for(lambda: run.is_settled(living))
            brought_up.append(longest_step(run, began))
        assert not run.events("lost ranges"), run.events("lost ranges")
        usual = [b - a for number in range(WORKERS) for a, b in itertools.pairwise(run.said(number))]
    return Outages(found, median(usual), killed, brought_up)


# -- the cost of a second copy -----------------------------------------------------------------------------------------


def rate(consistency: str, replicas: int, seconds: float) -> float:
    with running(consistency, servers=2, replicas=replicas) as run:
        time.sleep(WARM_S)
        begin = time.monotonic()
        time.sleep(seconds)
        end = time.monotonic()
        run.wait_for(lambda: all(run.said(number)[-1] > end for number in range(WORKERS)))
        counts = [len(said_within(run, number, begin, end)) for number in range(WORKERS)]
    # Of a step all workers say that it is done; a lease is done by one.
    return (max(counts) if consistency == "sync" else sum(counts)) / (end - begin)


# -- a server that joins -----------------------------------------------------------------------------------------------


def joined(capacity: float, *, has_table: bool) -> tuple[float, float]:
    """The part of all bytes, or of all keys, that a server holds which came late, and the part that its capacity is of
    all."""
    with running("async", servers=2, replicas=1, has_table=has_table) as run:
        newcomer = run.add_server(capacity=capacity)
        run.wait_for(lambda: run.is_settled([0, 1, 2]))
        time.sleep(WARM_S)  # until all have said what they hold
        rows = [row for row in run.ask("status")["members"] if row["role"] == "server"]
        held = {row["pid"]: row["num_keys" if has_table else "num_bytes"] for row in rows}
    return held[newcomer.pid] / sum(held.values()), capacity / (2 + capacity)


# -- all of it ---------------------------------------------------------------------------------------------------------


def measure_outages(kills: int, record: dict[str, Any]) -> list[Table]:
    deaths = Table("", "resumed, s (highest)", f"within {TARGET_S:g} s", "two steps at other times, s")
    deaths.title = "kill -9 of one of three servers, two copies"
    stalls = Table(
        "", "killed: median, s", "longest, s", "brought up: median, s", "longest, s", f"within {STALL_S:g} s"
    )
    stalls.title = "the longest stall of any worker beyond a step"
    for number, consistency in enumerate(CONSISTENCIES):
        seen = outages(consistency, kills, seed=number)
        within = sum(one <= TARGET_S for one in seen.resumed)
        told = with_worst(seen.resumed, ".3f")
        deaths.add_row(consistency, told, f"{within} of {len(seen.resumed)}", f"{2 * seen.usual:.3f}")
        killed, brought_up = seen.stalls(seen.killed), seen.stalls(seen.brought_up)
        figures = [f"{pick(each):.3f}" for each in (killed, brought_up) for pick in (median, max)]
        good = sum(one <= STALL_S for one in (*killed, *brought_up))
        stalls.add_row(consistency, *figures, f"{good} of {len(killed) + len(brought_up)}")
        record["kills"][consistency] = {"resumed_s": seen.resumed, "two_steps_s": 2 * seen.usual}
        record["stalls"][consistency] = {"step_s": seen.usual, "killed_s": killed, "brought_up_s": brought_up}
    return [deaths, stalls]


def measure_costs(rounds: int, seconds: float, record: dict[str, Any]) -> Table:
    cases = {
        f"{consistency} {copies}": functools.partial(rate, consistency, copies, seconds)
        for consistency, copies in itertools.product(CONSISTENCIES, (1, 2))
    }
    rates = interleave(cases, rounds)
    costs = Table("", "one copy", "two copies", "ratio", title="steps or leases/s of two workers, two servers")
    for consistency in CONSISTENCIES:
        one, two = rates[f"{consistency} 1"], rates[f"{consistency} 2"]
        costs.add_row(consistency, *(f"{median(each):.1f}" for each in (one, two)), f"{ratio(two, one):.2f}")
        record["rates"][consistency] = {"one": one, "two": two, "ratio": ratio(two, one)}
    return costs


def measure_joins(capacities: list[float], record: dict[str, Any]) -> Table:
    joins = Table("", "its capacity", "its part", "part of the capacity", "of it", title="a third server joins")
    for what, capacity in itertools.product(("bytes of dense parameters", "rows of a table"), capacities):
        held, wanted = joined(capacity, has_table=what == "rows of a table")
        joins.add_row(what, f"{capacity:g}", f"{held:.3f}", f"{wanted:.3f}", f"{held / wanted:.2f}")
        record["joins"].append({"of": what, "capacity": capacity, "held": held, "wanted": wanted})
    return joins


def measure(options: argparse.Namespace) -> Found:
    record: dict[str, Any] = {"kills": {}, "stalls": {}, "rates": {}, "joins": []}
    tables = measure_outages(options.kills, record)
    if options.rounds:
        tables.append(measure_costs(options.rounds, options.seconds, record))
        tables.append(measure_joins(options.capacities, record))
    return Found(record, tables)


def longest_stall_s(record: dict[str, Any]) -> float:
    return max(float(max(each["killed_s"] + each["brought_up_s"])) for each in record["stalls"].values())


BENCHMARK = Benchmark(
    __doc__,
    "server-deaths",
    measure,
    targets=[
        Target(
            "s until every worker has done two more steps, the longest of all",
            "two steps, which take 0.2 to 0.3",
            lambda record: float(max(max(each["resumed_s"]) for each in record["kills"].values())),
            at_most=TARGET_S,
        ),
        Target("s that any worker stalls beyond a step", "no stall", longest_stall_s, at_most=STALL_S),
    ],
    options=[
        Option("--kills", 20, quick=1, help="for each consistency"),
        Option("--rounds", 5, quick=1, help="of the cost of a second copy; 0: outages alone"),
        Option("--seconds", 5.0, quick=0.5, help="of each measurement of it"),
        Option("--capacities", [1.0, 2.0], quick=[1.0], help="of the servers that join"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
