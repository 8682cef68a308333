"""Trainings of a model that counts its samples, where each worker says what it sees."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from paceline.testing import faults
from paceline.testing.counting import Counting
from paceline.testing.rehearsal import say, worker_number
from paceline.train import transfer
from paceline.train.saving import Checkpoints
from paceline.train.session import Session


class Case(NamedTuple):
    counting: Counting
    consistency: str = "async"
    epochs: int = 2
    pause_s: float = 0.0
    every_steps: int | None = None
    keep_last: int = 3
    strategy: str = "server"


def train(case: Case, in_body: Callable[[int], None] = lambda _: None) -> dict[str, Any]:
    """Says its step after each lease; returns what is wrong with what this worker saw. `in_body` is told how many
    leases this worker has done."""
    counting = case.counting
    torch.manual_seed(1)
    model = counting.model()
    session = Session(
        model,
        counting.optimizer(model),
        data=counting.data(),
        global_batch=counting.batch,
        seed=counting.seed,
        strategy=case.strategy,  # type: ignore[arg-type]
        consistency=case.consistency,
        checkpoints=Checkpoints(every_s=None, every_steps=case.every_steps, keep_last=case.keep_last),
    )
    loss_fn = counting.loss_fn(model)
    wrong: list[str] = []
    num_own = 0
    with session:
        for epoch in session.epochs(case.epochs):
            for batch in epoch:
                time.sleep(case.pause_s * (1 + worker_number()))
                session.step(loss_fn, batch)
                num_own += 1
                say(session.steps)
                in_body(num_own)
            wrong += [
                f"after epoch {epoch.number}: {one}"
                for one in counting.faults_of_model(model.state_dict(), epoch.number + 1)
            ]
    wrong += [f"at the end: {one}" for one in counting.faults_of_model(model.state_dict(), case.epochs)]
    counts = counting.counts_of(model.counts)
    return {
        "faults": wrong,
        "own": num_own,
        "steps": session.steps,
        "lowest": counts.amin(0).tolist(),
        "highest": counts.amax(0).tolist(),
    }


def train_and_give_late(case: Case, num_meanwhile: int) -> dict[str, Any]:
    """What this worker gives to others leaves it only when it has done so many leases."""
    is_late = threading.Event()

    def wait(_: int) -> None:
        if not is_late.wait(30.0):
            raise TimeoutError(f"there were no {num_meanwhile} leases")

    faults.arm(transfer.SENDING, wait)
    return train(case, in_body=lambda num_own: is_late.set() if num_own == num_meanwhile else None)
