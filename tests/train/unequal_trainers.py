"""Trainings whose workers are unequal: a sample takes each as long as a table says.

Shares follow what workers measure, and a machine that has other things to do makes any of them slow now and then. So as
a rule these measure by a clock of their own (`Work`), which counts what a worker does, and not how long it waited for
a processor meanwhile: then the shares of each step follow from the table alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.testing.rehearsal import say, worker_number
from paceline.train import sharing
from paceline.train.loops import steps as step_loop
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import LENGTH, Numbered, digest, make_model

BATCH = 40
SAMPLE_S = 1e-3


class Work:
    """A clock that moves only while this worker works."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        return self._now

    def do(self, seconds: float) -> None:
        self._now += seconds


def normalised() -> nn.Module:
    """With batch statistics."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


def train_unequal(
    slowness: Callable[[int, int], float],
    epochs: int = 4,
    *,
    fits: Sequence[int] = (),
    make: Callable[[], nn.Module] = make_model,
    enough: str = "",
    is_timed: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """`slowness(worker, step)` is how often `SAMPLE_S` a sample takes. Worker k has no memory for more than `fits[k]`
    samples. Says (step, samples of this worker, workers) after every step, and returns the same for all of them. With
    `enough`, it goes on until there is a file of that name. If `is_timed`, it measures by the clock on the wall."""
    work = Work()
    if not is_timed:
        sharing.time = step_loop.time = work  # type: ignore[attr-defined, assignment]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    me = worker_number()
    session = Session(
        *(model, optimizer),
        data=Numbered(),
        global_batch=BATCH,
        seed=3,
        checkpoints=Checkpoints(every_s=None),
        **options,
    )
    attempt: list[int] = []
    steps: list[tuple[int, int, list[int]]] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        if me < len(fits) and len(x) > fits[me]:
            # What torch really raises: the kernel refuses so much at once.
            torch.empty(1 << 60, dtype=torch.uint8)
        attempt.extend(numbers.tolist())
        (time.sleep if is_timed else work.do)(len(x) * SAMPLE_S * slowness(me, session.steps))
        return F.cross_entropy(model(x), y)

    for epoch in session.epochs(1000 if enough else epochs):
        for batch in epoch:
            attempt.clear()
            session.step(loss_fn, batch)
            steps.append((epoch.number, session.steps, sorted(attempt)))
            say((session.steps, len(attempt), session.world_size))
        if session.should_stop(1.0 if enough and os.path.exists(enough) else -float(session.steps), patience=0):
            break
    session.close()
    return {
        "committed": steps,
        "digest": digest(model, optimizer),
        "steps": session.steps,
        "weights": torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist(),
    }


def num_steps(epochs: int) -> int:
    return epochs * -(-LENGTH // BATCH)


# -- who is how slow ---------------------------------------------------------------------------------------------------


def by_worker(factors: Sequence[float], worker: int, step: int) -> float:
    return factors[worker]


def slow_for_a_while(worker: int, step: int) -> float:
    """Worker 1, in the steps after number 30."""
    return 6.0 if worker == 1 and step >= 30 else 1.0
