"""How long training stands still while a worker joins, and how long after one fell silent.

Two workers train a model whose state (parameters and what Adam
keeps) is 100 MB. A third one joins, takes part for a while, and leaves in order; several times. Beside that stand the
times of copying 100 MB in memory and of sending it over a Unix socket.

- at the join: between the last step of two and the first step of three, as the slower of the old workers saw it,
  minus the median step of two. Newcomers are forked from a process that has imported torch; what they do before they
  are ready (building the model, a first discarded call of the loss, connecting) runs beside training.
- longest: the longest time between two steps from the newcomer's start on, minus the same.
- silence: the third worker is stopped (SIGSTOP) with default settings; from then until the others have committed a
  step without it, minus the heartbeat deadline.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common import Benchmark, Found, Option, Target, median, with_worst
from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.forking import fork_context
from paceline.testing.rehearsal import Rehearsal, worker_number
from paceline.train.session import Session
from paceline.train.warming import warm_up

STATE_BYTES = 100_000_000
BATCH = 96
LENGTH = 9600
SETTLED_STEPS = 15
WAIT_S = 60.0


class Line(NamedTuple):
    time: float
    step: int
    size: int


# -- in a worker -------------------------------------------------------------------------------------------------------


def build() -> nn.Module:
    """8.3 million parameters: with Adam's two moments, 100 MB."""
    return nn.Sequential(nn.Linear(1000, 2750), nn.ReLU(), nn.Linear(2750, 2020), nn.ReLU(), nn.Linear(2020, 10))


def train(folder: str, is_cold: bool) -> None:
    """Until the process is told to leave, or killed."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(LENGTH, 1000, generator=generator), torch.arange(LENGTH) % 10)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    if not is_cold:
        warm_up(model, loss_fn, data, samples=BATCH // 3)
    session = Session(model, optimizer, data=data, global_batch=BATCH, seed=0)
    log = os.open(f"{folder}/steps-{worker_number()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for epoch in session.epochs(1_000_000):
        for batch in epoch:
            session.step(loss_fn, batch)
            os.write(log, f"{time.monotonic():.6f} {session.steps} {session.world_size}\n".encode())


# -- watching ----------------------------------------------------------------------------------------------------------


def lines_of(run: Rehearsal, number: int) -> list[Line]:
    path = run.folder / f"steps-{number}.log"
    if not path.exists():
        return []
    complete = [text.split() for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]
    return [Line(float(at), int(step), int(size)) for at, step, size in complete]


def wait_steps(run: Rehearsal, number: int, size: int, after: float) -> None:
    """Until this worker has done some steps of so many workers."""

    def enough() -> bool:
        return sum(line.size == size and line.time > after for line in lines_of(run, number)) >= SETTLED_STEPS

    run.wait_for(enough, WAIT_S)


def intervals(lines: list[Line]) -> list[tuple[float, Line, Line]]:
    return [(second.time - first.time, first, second) for first, second in itertools.pairwise(lines)]


def median_step(lines: list[Line], size: int, since: float, until: float) -> float:
    return median(
        seconds
        for seconds, first, second in intervals(lines)
        if first.size == second.size == size and since < first.time and second.time <= until
    )


def one_join(run: Rehearsal) -> dict[str, float]:
    """A worker comes and goes."""
    settling = time.monotonic()
    wait_steps(run, 0, 2, settling)
    started = time.monotonic()
    run.add()
    newcomer = len(run.workers) - 1
    wait_steps(run, newcomer, 3, started)
    ended = time.monotonic()
    found: dict[str, float] = {"ready_and_in_s": lines_of(run, newcomer)[0].time - started}
    for number in (0, 1):
        lines = [line for line in lines_of(run, number) if settling < line.time <= ended]
        alone, together = median_step(lines, 2, settling, started), median_step(lines, 3, started, ended)
        at_join = next(s for s, first, second in intervals(lines) if first.size == 2 and second.size == 3)
        longest = max(seconds for seconds, _, second in intervals(lines) if second.time > started)
        own = {"step_of_2_s": alone, "step_of_3_s": together, "at_join_s": at_join, "longest_s": longest}
        found |= {name: max(value, found.get(name, 0.0)) for name, value in own.items()}
    found["stood_still_s"] = found["at_join_s"] - found["step_of_2_s"]
    found["longest_still_s"] = found["longest_s"] - found["step_of_2_s"]
    run.terminate(newcomer)
    run.finish([newcomer], WAIT_S)
    return found


def one_silence(run: Rehearsal, deadline_s: float) -> dict[str, float]:
    """A worker comes, falls silent, and is given up."""
    run.add()
    newcomer = len(run.workers) - 1
    wait_steps(run, newcomer, 3, 0.0)
    stopped = time.monotonic()
    run.stop(newcomer)

    def firsts() -> list[float]:
        each = ([line.time for line in lines_of(run, number) if _is_after(line, stopped)] for number in (0, 1))
        return [times[0] for times in each if times]

    try:
        run.wait_for(lambda: len(firsts()) == 2, WAIT_S)
    finally:
        run.resume(newcomer)
    run.finish([newcomer], WAIT_S)
    gap = max(firsts()) - stopped
    return {"gap_s": gap, "beyond_deadline_s": gap - deadline_s}


def _is_after(line: Line, stopped: float) -> bool:
    return line.time > stopped and line.size == 2


# -- what a machine can do at best -------------------------------------------------------------------------------------


def _receive(connection: socket.socket, rounds: int) -> None:
    target = memoryview(bytearray(STATE_BYTES))
    for _ in range(rounds):
        filled = 0
        while filled < STATE_BYTES:
            filled += connection.recv_into(target[filled:])
        connection.sendall(b"!")


def time_socket(rounds: int) -> list[float]:
    context = fork_context()
    ours, theirs = socket.socketpair()
    process = context.Process(target=_receive, args=(theirs, rounds))
    process.start()
    theirs.close()
    ours.settimeout(WAIT_S)
    data, times = memoryview(bytearray(STATE_BYTES)), []
    try:
        for _ in range(rounds):
            began = time.perf_counter()
            ours.sendall(data)
            ours.recv(1)
            times.append(time.perf_counter() - began)
    finally:
        ours.close()
        process.join(10.0)
        process.kill()
    return times[1:]


def time_copy(rounds: int) -> list[float]:
    source, target, times = torch.ones(STATE_BYTES // 4), torch.zeros(STATE_BYTES // 4), []
    for _ in range(rounds):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return times[1:]


TITLES = {
    "stood_still_s": "training stood still at the join",
    "longest_still_s": "longest stand from its start on",
    "step_of_2_s": "a step of two workers",
    "step_of_3_s": "a step of three workers",
    "ready_and_in_s": "from the newcomer's start to its first step",
}


def measure(options: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    settings = RunSettings(wanted=2)
    joins, silences = [], []
    with (
        tempfile.TemporaryDirectory(prefix="paceline-joins-") as name,
        Rehearsal(train, name, options.cold, workers=2, folder=Path(name), settings=settings) as run,
    ):
        for number in range(options.joins):
            joins.append(one_join(run))
            said = ", ".join(f"{what} {seconds * 1e3:.0f}" for what, seconds in joins[-1].items())
            print(f"join {number + 1} of {options.joins}, ms: {said}", flush=True)
        for number in range(options.stops):
            silences.append(one_silence(run, settings.silence_s))
            print(f"silence {number + 1} of {options.stops}: {silences[-1]['gap_s']:.3f} s", flush=True)
    copies, sendings = time_copy(20), time_socket(10)
    table = Table("what", "ms: median (worst)", title="a worker joins two, 100 MB of state")
    for key, title in TITLES.items():
        table.add_row(title, with_worst([row[key] for row in joins], ".0f", 1e3))
    table.add_row("copying 100 MB in memory", with_worst(copies, ".0f", 1e3))
    table.add_row("sending 100 MB over a Unix socket", with_worst(sendings, ".0f", 1e3))
    beyond = with_worst([row["beyond_deadline_s"] for row in silences], ".0f", 1e3)
    table.add_row(f"SIGSTOP: to the next step, beyond the deadline of {settings.silence_s:g} s", beyond)
    record = {"cold": options.cold, "joins": joins, "silences": silences, "copies_s": copies, "sendings_s": sendings}
    return Found(record, [table])


def stood_still_s(record: dict[str, Any]) -> float | None:
    return median(row["stood_still_s"] for row in record["joins"]) if record["joins"] else None


BENCHMARK = Benchmark(
    __doc__,
    "joins",
    measure,
    targets=[Target("s that training stands still at a join", "PCCL with 16 MB: 0.174", stood_still_s, at_most=0.174)],
    options=[
        Option("--joins", 15, quick=1),
        Option("--stops", 5, quick=1),
        Option("--cold", False, quick=False, help="newcomers that did not warm up before they were ready"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
