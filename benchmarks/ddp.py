"""PyTorch's own programs on Paceline's backend beside Gloo: two ranks on one host, one thread each.

Steps a second of DDP (25 million parameters, with and without gradient_as_bucket_view; a CNN and a transformer that
mostly compute) and of FSDP2, and how long survivors need to be told of a killed rank.

All ways are in the same two processes and take turns in each round, so that whatever else the machine does falls on all
of them; a figure is the median over rounds, of the slower rank, and a ratio the median of the ratios within rounds.
"Nothing sent" is DDP with torch's hook that hands each bucket back as it is: what no backend can exceed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import paceline.c10d  # noqa: F401  (registers the backend)
from benchmarks.common import Benchmark, Found, Option, Target, median, ratio, turns
from benchmarks.common.models import Step, plain_step
from benchmarks.steps import Case, cnn, mlp, transformer
from paceline.testing.crew import Crew, say

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


WORKS: dict[str, tuple[Callable[[bool], Case], Wrap]] = {
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


def prepare(_: None, work: str, small: bool) -> None:
    make, wrap = WORKS[work]
    _steps.clear()
    for way in ways_of(work):
        torch.manual_seed(0)
        model, x, y, num_steps = make(small)
        module = model if way == BASE else wrap(model, _groups["paceline" if way == NOTHING_SENT else way])
        if way == NOTHING_SENT:
            assert isinstance(module, DistributedDataParallel)
            module.register_comm_hook(None, noop_hook)
        _steps[way] = plain_step(module, x, y), num_steps
        for _warm in range(3):
            _steps[way][0]()


def ways_of(work: str) -> list[str]:
    """FSDP2 has no hook by which nothing would be sent."""
    return [way for way in WAYS if way != NOTHING_SENT or WORKS[work][1] is not fsdp]


def one_round(_: None, way: str) -> float:
    """Steps a second of this rank."""
    step, num_steps = _steps[way]
    step()  # what the turns of the others drove out of the cache
    dist.barrier(_groups["paceline"])
    began = time.perf_counter()
    for _again in range(num_steps):
        step()
    return num_steps / (time.perf_counter() - began)


def measure_steps(works: list[str], small: bool, num_rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, Crew(2, form=False, timeout_s=300.0) as crew:
        for rank in range(2):
            crew.start(enter, rank, f"{folder}/store", ranks=[rank])
        crew.finish()
        for work in works:
            crew.run(prepare, work, small)
            rounds: dict[str, list[float]] = {way: [] for way in ways_of(work)}
            for number in range(num_rounds):
                for way in turns(list(rounds), number):
                    rounds[way].append(min(crew.run(one_round, way)))
            results[work] = {
                "steps_per_s": {way: median(found) for way, found in rounds.items()},
                "of_gloo": {way: ratio(found, rounds["gloo"]) for way, found in rounds.items()},
                "rounds": rounds,
            }
    return results


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


def measure(options: argparse.Namespace) -> Found:
    works = [work for work in WORKS if options.only in work]
    steps = measure_steps(works, options.small, options.rounds) if works and options.rounds else {}
    deaths = measure_deaths(options.kills) if options.kills else {}
    rates = Table("steps a second (of Gloo's)", *WAYS)
    for work, found in steps.items():
        rate, of_gloo = found["steps_per_s"], found["of_gloo"]
        rates.add_row(work, *(f"{rate[way]:.2f} ({of_gloo[way]:.2f})" if way in rate else "" for way in WAYS))
    told = Table("a killed rank: told after, ms", "median", "worst", "member named")
    for backend, found in deaths.items():
        ms = found["ms"]
        told.add_row(backend, f"{median(ms):.1f}", f"{max(ms):.1f}", f"{found['named']} of {found['told']}")
    return Found({"steps": steps, "deaths": deaths}, [rates, told])


def of_gloo(work: str) -> Callable[[dict[str, Any]], float | None]:
    def figure(record: dict[str, Any]) -> float | None:
        return float(record["steps"][work]["of_gloo"]["paceline"]) if work in record["steps"] else None

    return figure


def told_ms(record: dict[str, Any]) -> float | None:
    return median(record["deaths"]["paceline"]["ms"]) if record["deaths"] else None


BENCHMARK = Benchmark(
    __doc__,
    "ddp",
    measure,
    targets=[
        Target("MLP of 25 million, DDP, times as fast", "Gloo", of_gloo("MLP 25M, DDP"), at_least=1.2),
        Target("MLP of 25 million, FSDP2, times as fast", "Gloo", of_gloo("MLP 25M, FSDP2"), at_least=2.0),
        Target("CNN, DDP, times as fast", "Gloo", of_gloo("CNN, DDP"), at_least=0.95),
        Target("transformer, DDP, times as fast", "Gloo", of_gloo("transformer, DDP"), at_least=0.95),
        Target("ms until survivors are told of a killed rank", "Gloo: 15 to 19, at times never", told_ms, at_most=15.0),
    ],
    options=[
        Option("--rounds", 9, quick=1),
        Option("--kills", 10, quick=1),
        Option("--small", False, quick=True, help="a small MLP, and fewer steps a round"),
        Option("--only", "", quick="", help="a part of the name of what to measure"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
