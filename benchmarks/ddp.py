"""PyTorch's own programs on Paceline's backend beside Gloo: two ranks on one host, one thread each.

Steps a second of DDP (25 million parameters, with and without gradient_as_bucket_view; a CNN and a transformer that
mostly compute) and of FSDP2, and how long survivors need to be told of a killed rank. Prints tables, keeps
benchmarks/results/ddp.json.

All ways are in the same two processes and take turns in each round, so that whatever else the machine does falls on all
of them; a figure is the median over rounds, of the slower rank, and a ratio the median of the ratios within rounds.
"Nothing sent" is DDP with torch's hook that hands each bucket back as it is: what no backend can exceed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as functional
from rich.console import Console
from rich.table import Table
from steps import Case, Step, cnn, mlp, transformer  # type: ignore[import-not-found, unused-ignore]
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline.c10d  # noqa: F401  (registers the backend)
from paceline.cli.bench import machine
from paceline.testing.crew import Crew, say

RESULTS = Path(__file__).parent / "results" / "ddp.json"
BACKENDS = ("paceline", "gloo")
NOTHING_SENT = "nothing sent"
BASE = "no communication"
WAYS = (*BACKENDS, NOTHING_SENT, BASE)
TIMEOUT = timedelta(seconds=120)

Wrap = Callable[[nn.Module, dist.ProcessGroup], nn.Module]


# -- steps a second ----------------------------------------------------------------------------------------------------


def ddp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group)


def ddp_views(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)


def fsdp(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("data",))
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WORKS: dict[str, tuple[Callable[[], Case], Wrap]] = {
    "MLP 25M, DDP": (mlp, ddp),
    "MLP 25M, DDP, bucket views": (mlp, ddp_views),
    "CNN, DDP": (cnn, ddp),
    "transformer, DDP": (transformer, ddp),
    "MLP 25M, FSDP2": (mlp, fsdp),
}

_groups: dict[str, dist.ProcessGroup] = {}
_steps: dict[str, tuple[Step, int]] = {}


def enter(_: None, rank: int, path: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    _groups.update(gloo=dist.group.WORLD, paceline=dist.new_group(backend="paceline", timeout=TIMEOUT))


def prepare(_: None, work: str) -> None:
    make, wrap = WORKS[work]
    _steps.clear()
    for way in ways_of(work):
        torch.manual_seed(0)
        model, x, y, num_steps = make()
        module = model if way == BASE else wrap(model, _groups["paceline" if way == NOTHING_SENT else way])
        if way == NOTHING_SENT:
            assert isinstance(module, DistributedDataParallel)
            module.register_comm_hook(None, noop_hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
        _steps[way] = _step(module, optimizer, x, y), num_steps
        for _warm in range(3):
            _steps[way][0]()


def ways_of(work: str) -> list[str]:
    """FSDP2 has no hook by which nothing would be sent."""
    return [way for way in WAYS if way != NOTHING_SENT or WORKS[work][1] is not fsdp]


def _step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> Step:
    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def one_round(_: None, way: str) -> float:
    """Steps a second of this rank."""
    step, num_steps = _steps[way]
    step()  # what the turns of the others drove out of the cache
    dist.barrier(_groups["paceline"])
    began = time.perf_counter()
    for _again in range(num_steps):
        step()
    return num_steps / (time.perf_counter() - began)


def measure_steps(works: list[str], num_rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Crew(2, form=False, timeout_s=300.0) as crew:
        for rank in range(2):
            crew.start(enter, rank, f"{folder}/store", ranks=[rank])
        crew.finish()
        for work in works:
            crew.run(prepare, work)
            rounds: dict[str, list[float]] = {way: [] for way in ways_of(work)}
            for number in range(num_rounds):
                ways = list(rounds)
                first = number % len(ways)
                for way in ways[first:] + ways[:first]:
                    rounds[way].append(min(crew.run(one_round, way)))
            results[work] = {
                "steps_per_s": {way: statistics.median(found) for way, found in rounds.items()},
                "of_gloo": {way: _ratio(found, rounds["gloo"]) for way, found in rounds.items()},
                "rounds": rounds,
            }
    return results


def _ratio(rates: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(rates, others, strict=True))


# -- a killed rank -----------------------------------------------------------------------------------------------------


def train_until_death(_: None, rank: int, backend: str, path: str) -> tuple[float, str]:
    """When this rank was told, and what."""
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=3, timeout=TIMEOUT)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 10)))
    x = torch.randn(32, 784)
    for _warm in range(5):
        model(x).sum().backward()
    say("under way")
    try:
        while True:
            model(x).sum().backward()
    except RuntimeError as error:
        told_at, text = time.monotonic(), str(error)
    return told_at, text


def measure_deaths(num_kills: int) -> dict[str, Any]:
    results: dict[str, Any] = {backend: {"ms": [], "named": 0, "told": 0} for backend in BACKENDS}
    for number in range(num_kills * len(BACKENDS)):
        backend = BACKENDS[number % len(BACKENDS)]
        with tempfile.TemporaryDirectory() as folder, Crew(3, form=False, timeout_s=180.0) as crew:
            for rank in range(3):
                crew.start(train_until_death, rank, backend, f"{folder}/store", ranks=[rank])
            for rank in range(3):
                crew.hear(rank)
            time.sleep(0.2 + 0.013 * number)
            killed_at = time.monotonic()
            crew.kill(1)
            for told_at, text in crew.finish([0, 2]):
                results[backend]["ms"].append((told_at - killed_at) * 1000)
                results[backend]["told"] += 1
                results[backend]["named"] += "(rank 1)" in text
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", default="", help="a part of the name of what to measure")
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    works = [work for work in WORKS if arguments.only in work]
    steps = measure_steps(works, arguments.rounds) if works and arguments.rounds else {}
    deaths = measure_deaths(arguments.kills) if arguments.kills else {}
    console = Console(width=120)
    table = Table("steps a second (of Gloo's)", *WAYS)
    for work, found in steps.items():
        rate, of_gloo = found["steps_per_s"], found["of_gloo"]
        table.add_row(work, *(f"{rate[way]:.2f} ({of_gloo[way]:.2f})" if way in rate else "" for way in WAYS))
    console.print(table)
    table = Table("a killed rank: told after, ms", "median", "worst", "member named")
    for backend, found in deaths.items():
        ms = found["ms"]
        named = f"{found['named']} of {found['told']}"
        table.add_row(backend, f"{statistics.median(ms):.1f}", f"{max(ms):.1f}", named)
    console.print(table)
    found = {"machine": machine.describe(), "steps": steps, "deaths": deaths}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
