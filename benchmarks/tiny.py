"""What a step costs beside its computation: a tiny model (64-128-128-10), 64 samples a worker, one thread, AdamW.

A plain loop, a session alone, two workers in a session, and DistributedDataParallel on Gloo; each with a batch of a
TensorDataset: a session's own, for the others torch's DataLoader. Step and batch are timed apart: a plain loop and DDP
step on a batch that lies there, and once more on those of the DataLoader.

The ways take turns in each round. A figure is the median over rounds of the mean over the round's steps, of the slower
worker, and what a target judges is a ratio to the plain loop within rounds: machines differ by more than two.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.common import Benchmark, Found, Option, Target, median, ratio, turns
from benchmarks.common.coordinating import coordinator
from benchmarks.common.models import plain_step
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell import ticket as tickets
from paceline.control.shell.ticket import Ticket
from paceline.testing.crew import Crew
from paceline.train.session import Session

SAMPLES = 64  # of a worker in a step
NUM_BATCHES = 500  # of a worker in an epoch
PLAIN, ALONE, TWO, GLOO = "plain loop", "session alone", "session, 2 workers", "DDP on Gloo, 2 workers"
SIZES = {PLAIN: 1, ALONE: 1, TWO: 2, GLOO: 2}


class Timed(NamedTuple):
    """Means of one worker over the steps of a round, in seconds."""

    step: float
    batch: float


# A round of so many steps.
Round = Callable[[int], Timed]


def _parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _data(size: int) -> TensorDataset:
    num = SAMPLES * NUM_BATCHES * size
    return TensorDataset(torch.randn(num, 64), torch.randint(10, (num,)))


# -- the ways ----------------------------------------------------------------------------------------------------------


def with_session(size: int) -> Round:
    model, optimizer = _parts()
    session = Session(model, optimizer, data=_data(size), global_batch=SAMPLES * size)
    _sessions.append(session)
    batches = (batch for epoch in session.epochs(1_000_000) for batch in epoch)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    return functools.partial(_timed, batches, lambda batch: session.step(loss_fn, batch))


def without_session(rank: int, size: int) -> Round:
    model, optimizer = _parts()
    module = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    data = _data(size)
    x, y = data[:SAMPLES]
    fixed = plain_step(module, x, y, optimizer)
    sampler: DistributedSampler[Any] = DistributedSampler(data, size, rank)
    loader = DataLoader(data, SAMPLES, sampler=sampler)
    batches = (batch for _ in iter(int, 1) for batch in loader)

    def step(batch: list[torch.Tensor]) -> None:
        plain_step(module, batch[0], batch[1], optimizer)()

    def one_round(num_steps: int) -> Timed:
        # As many of each, since a step after a batch of torch's loader finds less in the cache.
        alone = [_seconds(fixed) for _ in range(num_steps)]
        return Timed(statistics.fmean(alone), _timed(batches, step, num_steps).batch)

    return one_round


def _timed(batches: Iterator[Any], step: Callable[[Any], object], num_steps: int) -> Timed:
    fetched, stepped = [], []
    for _ in range(num_steps):
        began = time.perf_counter()
        batch = next(batches)
        fetched.append(time.perf_counter() - began)
        stepped.append(_seconds(functools.partial(step, batch)))
    return Timed(statistics.fmean(stepped), statistics.fmean(fetched))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# -- measuring ---------------------------------------------------------------------------------------------------------

_prepared: dict[str, Round] = {}
_sessions: list[Session] = []


def prepare(_: None, way: str, rank: int, store: str, ticket: Ticket | None) -> None:
    torch.set_num_threads(1)
    if ticket is not None:
        os.environ[tickets.VARIABLE] = str(tickets.hand_over(ticket))
    if way == GLOO:
        torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=SIZES[way])
    is_session = way in (ALONE, TWO)
    _prepared["here"] = with_session(SIZES[way]) if is_session else without_session(rank, SIZES[way])
    _prepared["here"](20)


def one_round(_: None, num_steps: int) -> Timed:
    _prepared["here"](5)  # what the turns of the others drove out of the cache
    return _prepared["here"](num_steps)


def finish(_: None) -> None:
    for session in _sessions:
        session.close()


def measure(options: argparse.Namespace) -> Found:
    found: dict[str, list[Timed]] = {way: [] for way in options.ways}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        crews = {way: stack.enter_context(Crew(SIZES[way], form=False)) for way in options.ways}
        for way, crew in crews.items():
            settings = RunSettings(wanted=SIZES[way])
            ticket = stack.enter_context(coordinator(Path(folder), settings)) if way == TWO else None
            for rank in range(SIZES[way]):
                crew.start(prepare, way, rank, f"{folder}/store", ticket, ranks=[rank])
            crew.finish()
        for number in range(options.rounds):
            for way in turns(options.ways, number):
                each = crews[way].run(one_round, options.steps)
                found[way].append(Timed(*map(max, zip(*each, strict=True))))
            print(f"round {number + 1} of {options.rounds}", flush=True)
        for crew in crews.values():
            crew.run(finish)
    record = {way: [timed._asdict() for timed in timeds] for way, timeds in found.items()}
    return Found({"rounds": record}, [_table(record)])


def _table(rounds: dict[str, list[dict[str, float]]]) -> Table:
    table = Table("", "step, ms", "of the plain loop's", "batch, ms", title="64-128-128-10, 64 samples a worker")
    for way, timeds in rounds.items():
        step, batch = (median(timed[what] for timed in timeds) * 1e3 for what in ("step", "batch"))
        of_plain = _of_plain(way, "step")({"rounds": rounds})
        table.add_row(way, f"{step:.3f}", "" if of_plain is None else f"{of_plain:.2f}", f"{batch:.3f}")
    return table


def _of_plain(way: str, what: str) -> Callable[[dict[str, Any]], float | None]:
    """Step or batch of a way, in steps of the plain loop."""

    def figure(record: dict[str, Any]) -> float | None:
        rounds = record["rounds"]
        if not {way, PLAIN} <= set(rounds):
            return None
        return ratio([timed[what] for timed in rounds[way]], [timed["step"] for timed in rounds[PLAIN]])

    return figure


BENCHMARK = Benchmark(
    __doc__,
    "tiny",
    measure,
    targets=[
        Target(ALONE, "of the plain loop: 1.0 ms where that takes 0.82", _of_plain(ALONE, "step"), at_most=1.22),
        Target(TWO, "of the plain loop: 1.4 ms where that takes 0.82", _of_plain(TWO, "step"), at_most=1.71),
        Target(
            f"batch, {ALONE}",
            "of the plain loop: 0.1 ms where a step takes 0.82",
            _of_plain(ALONE, "batch"),
            at_most=0.122,
        ),
        Target(f"batch, {TWO}", "the same", _of_plain(TWO, "batch"), at_most=0.122),
    ],
    options=[
        Option("--rounds", 15, quick=1),
        Option("--steps", 400, quick=20, help="of a round"),
        Option("--ways", list(SIZES), quick=list(SIZES), choices=list(SIZES)),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
