"""One worker of benchmarks/outages: the same model, data and loaders under each system.

After every step it adds a line to FOLDER/<pid>.log: the time (monotonic), the step, the number of workers that took
part, whether the step counts, how often it was computed, the epoch, and the numbers of its samples. It trains until
it is killed.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

LENGTH = 9600
LOADERS = 2
WORKERS = 3
EPOCHS = 1_000_000

Sample = tuple[torch.Tensor, int, int]


class Numbered(Dataset[Sample]):
    """Samples that know their number."""

    def __init__(self) -> None:
        self._x = torch.randn(LENGTH, 784, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Sample:
        return self._x[index], index % 10, index


class Log:
    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, step: int, size: int, counts: bool, attempts: int, epoch: int, samples: list[int]) -> None:
        numbers = ",".join(map(str, samples))
        line = f"{time.monotonic():.6f} {step} {size} {int(counts)} {attempts} {epoch} {numbers}\n"
        os.write(self._file, line.encode())


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """4.07 million parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1600), nn.ReLU(), nn.Linear(1600, 1750), nn.ReLU(), nn.Linear(1750, 10))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def paceline(options: argparse.Namespace, log: Log) -> None:
    from paceline import Session
    from paceline.data.loader import LoaderOptions

    model, optimizer = build()
    loader = LoaderOptions(num_workers=LOADERS)
    session = Session(model, optimizer, data=Numbered(), global_batch=options.batch, seed=0, loader=loader)
    attempts: list[list[int]] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        attempts.append(numbers.tolist())
        return functional.cross_entropy(model(x), y)

    for epoch in session.epochs(EPOCHS):
        for batch in epoch:
            session.step(loss_fn, batch)
            log.note(
                session.steps, session.world_size, True, len(attempts), epoch.number, attempts[-1] if attempts else []
            )
            attempts.clear()


def _batches(rank: int, batch: int) -> Iterator[tuple[int, Any]]:
    """The epochs and batches of one of three, without end; its loader workers are started before anything else is."""
    data = Numbered()
    sampler: DistributedSampler[Sample] = DistributedSampler(data, WORKERS, rank, seed=0)
    loader = DataLoader(data, batch // WORKERS, sampler=sampler, num_workers=LOADERS, persistent_workers=True)
    iterator = iter(loader)

    def walk() -> Iterator[tuple[int, Any]]:
        for batch in iterator:
            yield 0, batch
        for epoch in range(1, EPOCHS):
            sampler.set_epoch(epoch)
            for batch in loader:
                yield epoch, batch

    return walk()


def torchrun(options: argparse.Namespace, log: Log) -> None:
    rank = int(os.environ["RANK"])
    batches = _batches(rank, options.batch)
    torch.distributed.init_process_group("gloo")
    model, optimizer = build()
    parallel = nn.parallel.DistributedDataParallel(model)
    for step, (epoch, (x, y, numbers)) in enumerate(batches, 1):
        optimizer.zero_grad()
        functional.cross_entropy(parallel(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log.note(step, WORKERS, True, 1, epoch, numbers.tolist())


def torchft(options: argparse.Namespace, log: Log) -> None:
    import torchft as ft  # type: ignore[import-not-found]
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    batches = _batches(options.rank, options.batch)
    model, optimizer = build()

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    collectives = ft.ProcessGroupGloo(timeout=timedelta(seconds=options.gloo_timeout_s))
    manager = ft.Manager(
        pg=collectives,
        load_state_dict=load,
        state_dict=save,
        min_replica_size=WORKERS - 1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=options.lighthouse,
        replica_id=f"worker{options.rank}",
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(milliseconds=options.heartbeat_ms),
    )
    parallel = ft.DistributedDataParallel(manager, model)
    wrapped = ft.Optimizer(manager, optimizer)
    for epoch, (x, y, numbers) in batches:
        wrapped.zero_grad()
        functional.cross_entropy(parallel(x), y).backward()  # type: ignore[no-untyped-call]
        before = manager.current_step()
        wrapped.step()
        step = manager.current_step()
        log.note(step, manager.num_participants(), step > before, 1, epoch, numbers.tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("system", choices=("paceline", "torchrun", "torchft"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--gloo-timeout-s", type=float, default=60.0)
    parser.add_argument("--heartbeat-ms", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"paceline": paceline, "torchrun": torchrun, "torchft": torchft}[options.system](options, Log(options.folder))


if __name__ == "__main__":
    main()
