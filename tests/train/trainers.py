"""Small trainings for tests: linear data, a tiny model, and a note of every sample that was committed."""

from __future__ import annotations

import hashlib
import math
import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from paceline.testing.rehearsal import say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

LENGTH = 203
BATCH = 16


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """Samples that know their number."""

    def __init__(self, length: int = LENGTH) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(length, 8, generator=generator)
        self._y = (self._x @ torch.randn(8, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self._x[index], self._y[index], index


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A fingerprint of all bits of the training state."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()[:16]


def train(epochs: int = 3, pause_s: float = 0.01, enough: str = "", **options: Any) -> dict[str, Any]:
    """Says (steps, workers, loss) after every step; returns the samples it contributed and the digest of what came out.
    With `enough`, it goes on for as many epochs as it takes until there is a file of that name."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    data = Numbered()
    options.setdefault("checkpoints", Checkpoints(every_s=None))
    session = Session(model, optimizer, schedule, data=data, global_batch=BATCH, seed=3, **options)
    attempt: list[int] = []
    committed: list[tuple[int, int, list[int]]] = []
    scores: list[dict[str, Any]] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        attempt.extend(numbers.tolist())
        time.sleep(pause_s)
        return F.cross_entropy(model(x), y)

    def begin_attempt(*batch: Any) -> torch.Tensor:
        attempt.clear()
        return loss_fn(*batch)

    def validate(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    for epoch in session.epochs(1000 if enough else epochs):
        for batch in epoch:
            attempt.clear()
            loss = session.step(begin_attempt, batch)
            schedule.step()
            session.state["bodies"] = session.state.get("bodies", 0) + 1
            committed.append((epoch.number, session.steps, sorted(attempt)))
            say((session.steps, session.size, loss))
        scores.append(session.evaluate(validate, data))
        is_enough = bool(enough) and os.path.exists(enough)  # what the main worker sees counts for all
        if session.should_stop(math.inf if is_enough else -float(session.steps), patience=0):
            break
    bodies = session.state["bodies"]
    session.close()
    return {
        "pid": os.getpid(),
        "committed": committed,
        "digest": digest(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "bodies": bodies,
        "steps": session.steps,
        "scores": scores,
        "weights": torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist(),
    }
