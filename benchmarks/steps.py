"""Training steps a second of two workers on one host, one thread each: without communication, with a bare loop on the
collectives (the strategy's three calls), with a session, and with DistributedDataParallel on Gloo.

The ways take turns in each round, so that whatever else the
machine does falls on all of them; a figure is the median over rounds, of the slower worker, and a ratio the median of
the ratios within rounds. What a session costs where nothing goes wrong is its ratio to the bare loop. No way loads
data: each step has the same batch. To compare another way, add a function to WAYS.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn

from benchmarks.common import Benchmark, Found, Option, Target, median, ratio, turns
from benchmarks.common.coordinating import coordinator
from benchmarks.common.models import Step, plain_step, small_cnn
from paceline.collective import Group
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell import ticket as tickets
from paceline.control.shell.ticket import Ticket
from paceline.data.loader import LoaderOptions
from paceline.strategy import Notice, Updater
from paceline.testing.crew import Crew
from paceline.train.session import Session

NUM_WORKERS = 2
BASE = "no communication"
BARE = "bare"
SESSION = "session"
DDPS = ("DDP", "DDP, bucket views")

# A model, its input and target for one worker, and how many steps make a round.
Case = tuple[nn.Module, torch.Tensor, torch.Tensor, int]


# -- what is trained ---------------------------------------------------------------------------------------------------


def mlp(small: bool) -> Case:
    """25 million parameters; small: half a million."""
    layers: list[nn.Module] = []
    wide = 10 if small else 1
    for inputs, outputs in [(784, 2800), (2800, 2800), (2800, 2800), (2800, 2600)]:
        layers += [nn.Linear(inputs if inputs == 784 else inputs // wide, outputs // wide), nn.ReLU()]
    num_steps = 2 if small else 5
    return (
        nn.Sequential(*layers, nn.Linear(2600 // wide, 10)),
        torch.randn(32, 784),
        torch.randint(10, (32,)),
        num_steps,
    )


def cnn(small: bool) -> Case:
    return small_cnn(), torch.randn(64, 1, 28, 28), torch.randint(10, (64,)), 2 if small else 10


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embedding(tokens)).mean(1))
        return found


def transformer(small: bool) -> Case:
    return Transformer(), torch.randint(64, (64, 32)), torch.randint(10, (64,)), 2 if small else 10


CASES: dict[str, Callable[[bool], Case]] = {"MLP": mlp, "CNN": cnn, "transformer": transformer}


# -- the ways to train it ----------------------------------------------------------------------------------------------


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def without_communication(group: Group, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    return plain_step(model, x, y)


def bare(group: Group, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    strategy = Updater(model, _optimizer(model))
    strategy.bind(group, group.rank, group.size)
    samples, number = len(x), 0

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    def step() -> None:
        nonlocal number
        number += 1
        found = strategy.compute(loss_fn, (x, y), samples=samples, total=samples * group.size, step=number)
        strategy.apply(strategy.exchange(found, Notice(number)))

    return step


def with_session(group: Group, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    """As a script has it, with the run's coordinator; only the batch is always the same one."""
    count = len(x) * NUM_WORKERS
    loader = LoaderOptions(collate_fn=lambda _: (x, y))
    session = Session(model, _optimizer(model), data=range(count * 1000), global_batch=count, loader=loader)
    batches = (batch for epoch in session.epochs(1_000_000) for batch in epoch)
    _sessions.append(session)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(x), y)

    def step() -> None:
        session.step(loss_fn, next(batches))

    return step


def with_ddp(group: Group, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    return plain_step(nn.parallel.DistributedDataParallel(model), x, y)


def with_ddp_views(group: Group, model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Step:
    return plain_step(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), x, y)


WAYS: dict[str, Callable[[Group, nn.Module, torch.Tensor, torch.Tensor], Step]] = {
    BASE: without_communication,
    BARE: bare,
    SESSION: with_session,
    DDPS[0]: with_ddp,
    DDPS[1]: with_ddp_views,
}


# -- measuring ---------------------------------------------------------------------------------------------------------


_prepared: dict[str, tuple[Step, int]] = {}
_sessions: list[Session] = []


def prepare(group: Group, case: str, small: bool, way: str, store: str, ticket: Ticket | None) -> int:
    """Build the model and take a few steps; the number of its parameters."""
    torch.set_num_threads(1)
    if ticket is not None:
        os.environ[tickets.VARIABLE] = str(tickets.hand_over(ticket))
    if "DDP" in way:
        torch.distributed.init_process_group("gloo", f"file://{store}", rank=group.rank, world_size=group.size)
    torch.manual_seed(0)
    model, x, y, num_steps = CASES[case](small)
    step = WAYS[way](group, model, x, y)
    for _ in range(3):
        step()
    _prepared["here"] = step, num_steps
    return sum(parameter.numel() for parameter in model.parameters())


def one_round(group: Group) -> float:
    """Seconds a step of this worker."""
    step, num_steps = _prepared["here"]
    step()  # what the turns of the others drove out of the cache
    group.barrier()
    began = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - began) / num_steps


def finish(group: Group) -> None:
    for session in _sessions:
        session.close()


def measure_case(case: str, small: bool, num_rounds: int, ways: list[str]) -> dict[str, Any]:
    slower: dict[str, list[float]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        # Processes of its own for each way: what one leaves in the allocator would speed up another.
        crews = {way: stack.enter_context(Crew(NUM_WORKERS)) for way in ways}
        for number, (way, crew) in enumerate(crews.items()):
            settings = RunSettings(wanted=NUM_WORKERS)
            ticket = stack.enter_context(coordinator(Path(folder), settings)) if way == SESSION else None
            num_parameters = crew.run(prepare, case, small, way, f"{folder}/store-{number}", ticket)[0]
        for number in range(num_rounds):
            for way in turns(ways, number):
                slower[way].append(max(crews[way].run(one_round)))
            print(f"{case}: round {number + 1} of {num_rounds}", flush=True)
        for crew in crews.values():
            crew.run(finish)
    return {
        "model": case,
        "parameters": num_parameters,
        "steps_per_s": {way: 1 / median(slower[way]) for way in ways},
        "of_no_communication": {way: ratio(slower[BASE], slower[way]) for way in ways},
        "session_of_bare": ratio(slower[BARE], slower[SESSION]) if {BARE, SESSION} <= set(ways) else None,
        "seconds": slower,
    }


def measure(options: argparse.Namespace) -> Found:
    ways = [BASE, *(way for way in options.ways if way != BASE)]
    rows = [measure_case(case, options.small, options.rounds, ways) for case in options.models]
    table = Table("model", "parameters", *ways, "session of bare", title="steps a second (of no communication)")
    for row in rows:
        each = [f"{row['steps_per_s'][way]:.1f} ({row['of_no_communication'][way]:.2f})" for way in ways]
        cost = f"{row['session_of_bare']:.3f}" if row["session_of_bare"] is not None else "not measured"
        table.add_row(row["model"], f"{row['parameters']:,}", *each, cost)
    return Found({"rows": rows}, [table])


def session_of_ddp(record: dict[str, Any]) -> float | None:
    """With the MLP, beside the faster form of DDP."""
    for row in record["rows"]:
        rates = row["steps_per_s"]
        if row["model"] == "MLP" and {SESSION, *DDPS} <= set(rates):
            return float(rates[SESSION] / max(rates[way] for way in DDPS))
    return None


def session_of_bare(record: dict[str, Any]) -> float | None:
    found = [row["session_of_bare"] for row in record["rows"] if row["session_of_bare"] is not None]
    return min(found, default=None)


BENCHMARK = Benchmark(
    __doc__,
    "steps",
    measure,
    targets=[
        Target("session, MLP, times as fast", "DDP on Gloo with bucket views", session_of_ddp, at_least=1.3),
        Target("session, the slowest model, times as fast", "a bare loop", session_of_bare, at_least=0.95),
    ],
    options=[
        Option("--rounds", 15, quick=1),
        Option("--small", False, quick=True, help="a small MLP, and fewer steps a round"),
        Option("--models", list(CASES), quick=["MLP", "CNN"], choices=list(CASES)),
        Option("--ways", list(WAYS), quick=list(WAYS), choices=list(WAYS)),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
