"""What a worker does while it is measured: it trains a small model on the same batch again and again, one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn

from benchmarks.common.models import small_cnn
from benchmarks.common.slowness import slowed
from benchmarks.shares.plan import TIMED
from paceline.control.shell import ticket as tickets
from paceline.control.shell.ticket import Ticket
from paceline.data.loader import LoaderOptions
from paceline.testing.crew import say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

NUM_WARM = 30  # steps: by then shares have settled
SAMPLE_S = 1e-3  # of timed work, at speed 1

_kept: list[nn.Module] = []

Batch = tuple[torch.Tensor, torch.Tensor]


class Trained(NamedTuple):
    """How long all steps after the first ones took, and the samples of this worker in each step, those included."""

    seconds: float
    num_steps: int
    shares: list[int]


class Work:
    """A model, a batch, and the loss. `slowness()` is how many times slower this worker is to be than it is now; 1
    where the kernel sees to it. Timed work takes that long by itself; for other work somebody has to sleep."""

    def __init__(self, name: str, samples: int, slowness: Callable[[], float]) -> None:
        torch.manual_seed(0)
        self._is_timed = name == TIMED
        self._slowness = slowness
        self.model = _linear() if self._is_timed else small_cnn()
        generator = torch.Generator().manual_seed(1)
        self.batch: Batch = (
            torch.randn(samples, 1, 28, 28, generator=generator),
            torch.randint(10, (samples,), generator=generator),
        )

    def loss(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._is_timed:
            time.sleep(len(x) * SAMPLE_S * self._slowness())
        return functional.cross_entropy(module(x), y)

    def owed(self) -> float:
        """How many times what was computed is to be slept yet."""
        return 0.0 if self._is_timed else self._slowness() - 1.0

    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=1e-3)


def _linear() -> nn.Module:
    """About as many parameters as the CNN has."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 72), nn.ReLU(), nn.Linear(72, 10))


# -- the contenders ----------------------------------------------------------------------------------------------------


def alone(_: None, name: str, samples: int, num_steps: int, slowness: float) -> Trained:
    """As a script without any framework does it."""
    work = Work(name, samples, lambda: slowness)
    optimizer = work.optimizer()

    def step() -> None:
        began = time.monotonic()
        optimizer.zero_grad()
        work.loss(work.model, *work.batch).backward()  # type: ignore[no-untyped-call]
        time.sleep(work.owed() * (time.monotonic() - began))
        optimizer.step()

    return _timed(step, num_steps, samples)


def with_ddp(
    _: None, store: str, rank: int, size: int, name: str, samples: int, num_steps: int, slowness: float
) -> Trained:
    """Where sleep is owed, it comes between forward and backward, as long as computing takes without the others."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    work = Work(name, samples, lambda: slowness)
    compute_s = alone(None, name, samples, 10, 1.0).seconds / 10 if work.owed() else 0.0
    parallel = nn.parallel.DistributedDataParallel(work.model)
    optimizer = work.optimizer()

    def step() -> None:
        optimizer.zero_grad()
        loss = work.loss(parallel, *work.batch)
        time.sleep(work.owed() * compute_s)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    # Kept until the process ends: a group that is destroyed before its module sometimes never returns.
    _kept.append(parallel)
    return _timed(step, num_steps, samples)


def with_session(
    _: None,
    ticket: Ticket,
    name: str,
    total: int,
    num_steps: int,
    slowness: Sequence[float],
    change_every: int = 0,
    speaks: bool = False,
) -> Trained:
    """As a script has it; only the samples are always the same ones. Every `change_every` steps the next slowness is in
    force, if there is one, and who `speaks` says so."""
    os.environ[tickets.VARIABLE] = str(tickets.hand_over(ticket))
    shares: list[int] = []

    def present() -> float:
        part = max(0, len(shares) - NUM_WARM) // change_every if change_every else 0
        return slowness[part % len(slowness)]

    work = Work(name, total, present)
    x, y = work.batch
    session = Session(
        *(work.model, work.optimizer()),
        data=range(total * (num_steps + NUM_WARM)),
        global_batch=total,
        loader=LoaderOptions(collate_fn=lambda samples: (x[: len(samples)], y[: len(samples)])),
        checkpoints=Checkpoints(every_s=None),
    )
    attempt = [0]

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        attempt[0] = len(x)
        return work.loss(work.model, x, y)

    loss = slowed(loss_fn, lambda: 1.0 + work.owed()) if work.owed() else loss_fn
    began = 0.0
    for epoch in session.epochs(1):
        for batch in epoch:
            if len(shares) == NUM_WARM:
                began = time.monotonic()
            attempt[0] = 0
            session.step(loss, batch)
            shares.append(attempt[0])
            done = len(shares) - NUM_WARM
            if speaks and 0 < done < num_steps and done % change_every == 0:
                say(done)
    seconds = time.monotonic() - began
    session.close()
    return Trained(seconds, num_steps, shares)


def _timed(step: Callable[[], Any], num_steps: int, samples: int) -> Trained:
    for _ in range(3):
        step()
    began = time.monotonic()
    for _ in range(num_steps):
        step()
    return Trained(time.monotonic() - began, num_steps, [samples] * num_steps)
