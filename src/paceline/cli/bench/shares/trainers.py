"""What a worker does while it is measured: it trains a small CNN on the same batch again and again, one thread."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from torch import nn

from paceline.control import ticket as tickets
from paceline.control.ticket import Ticket
from paceline.data.loader import LoaderOptions
from paceline.testing.crew import say
from paceline.testing.slowness import slowed
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

NUM_WARM = 30  # steps: by then shares have settled

# How many times slower than it is a worker is to be in a step; 1 where the kernel sees to it.
Slowness = Sequence[float]


class Trained(NamedTuple):
    """How long all steps after the first ones took, and the samples of this worker in each step, those included."""

    seconds: float
    num_steps: int
    shares: list[int]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def make_batch(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 1, 28, 28, generator=generator)
    return images, torch.randint(10, (samples,), generator=generator)


def alone(_: None, samples: int, num_steps: int, slowness: float) -> Trained:
    """As a script without any framework does it."""
    model, (x, y) = make_model(), make_batch(samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        began = time.monotonic()
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        time.sleep((slowness - 1.0) * (time.monotonic() - began))
        optimizer.step()

    return _timed(step, num_steps, warm=3, shares=[samples] * num_steps)


def with_ddp(_: None, store: str, rank: int, size: int, samples: int, num_steps: int, slowness: float) -> Trained:
    """Sleeps between forward and backward, as long as computing takes without the others."""
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    model, (x, y) = make_model(), make_batch(samples)
    compute_s = 0.0
    if slowness > 1.0:
        compute_s = alone(None, samples, 10, 1.0).seconds / 10
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        optimizer.zero_grad()
        loss = functional.cross_entropy(parallel(x), y)
        time.sleep((slowness - 1.0) * compute_s)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    try:
        return _timed(step, num_steps, warm=3, shares=[samples] * num_steps)
    finally:
        torch.distributed.destroy_process_group()


def with_session(
    _: None, ticket: Ticket, total: int, num_steps: int, slowness: Slowness, change_every: int = 0, speaks: bool = False
) -> Trained:
    """As a script has it; only the samples are always the same ones. Every `change_every` steps the next slowness is in
    force, if there is one, and who `speaks` says so."""
    os.environ[tickets.VARIABLE] = str(tickets.hand_over(ticket))
    model, (x, y) = make_model(), make_batch(total)
    loader = LoaderOptions(collate_fn=lambda samples: (x[: len(samples)], y[: len(samples)]))
    session = Session(
        *(model, torch.optim.SGD(model.parameters(), lr=1e-3)),
        data=range(total * (num_steps + NUM_WARM)),
        global_batch=total,
        loader=loader,
        checkpoints=Checkpoints(every_s=None),
    )
    shares: list[int] = []
    attempt = [0]

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        attempt[0] = len(x)
        return functional.cross_entropy(model(x), y)

    def present() -> float:
        part = max(0, len(shares) - NUM_WARM) // change_every if change_every else 0
        return slowness[part % len(slowness)]

    with slowed(present):
        began = 0.0
        for epoch in session.epochs(1):
            for batch in epoch:
                if len(shares) == NUM_WARM:
                    began = time.monotonic()
                attempt[0] = 0
                session.step(loss_fn, batch)
                shares.append(attempt[0])
                done = len(shares) - NUM_WARM
                if speaks and 0 < done < num_steps and done % change_every == 0:
                    say(done)
        seconds = time.monotonic() - began
        session.close()
    return Trained(seconds, num_steps, shares)


def _timed(step: Callable[[], Any], num_steps: int, *, warm: int, shares: list[int]) -> Trained:
    for _ in range(warm):
        step()
    began = time.monotonic()
    for _ in range(num_steps):
        step()
    return Trained(time.monotonic() - began, num_steps, shares)
