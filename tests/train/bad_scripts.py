"""Scripts with a fault in them: on worker 1 something is not as on the others."""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import paceline
from paceline.errors import Refused
from paceline.testing.rehearsal import say, worker_number
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import Numbered


class Other(Numbered):
    """As many samples, but not the same ones."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y, number = super().__getitem__(index)
        return x + 1, y, number


def odd_ones(faults: dict[int, str], enough: str = "") -> dict[str, Any]:
    """Trains, with `enough` until there is a file of that name; some workers differ by a fault."""
    fault = faults.get(worker_number(), "")
    width = 5 if fault == "model" else 4
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3))
    if fault == "paceline":
        paceline.__version__ = "0.0.1"
    if fault == "torch":
        torch.__version__ = "1.0.0"  # type: ignore[assignment]
    options: dict[str, Any] = {"data": Numbered(40), "global_batch": 8, "seed": 1}
    changes: dict[str, Any] = {
        "data": {"data": Other(40)},
        "length": {"data": Numbered(41)},
        "global_batch": {"global_batch": 10},
        "seed": {"seed": 2},
        "shuffle": {"shuffle": False},
        "order": {"order": lambda *_: torch.randperm(40).tolist()},
        "swallows": {"seed": 3},
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(model, optimizer, checkpoints=Checkpoints(every_s=None), **options | changes.get(fault, {}))
    if fault == "before":
        raise ArithmeticError("the script does not even start")

    def loss_fn(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    if fault == "swallows":
        try:
            next(session.epochs(1))
        except Refused:
            return {"swallowed": True}  # and the script ends as if nothing had happened
    for epoch in session.epochs(100_000 if enough else 2):
        for batch in epoch:
            session.step(loss_fn, batch)
            say((session.steps, session.world_size))
            if session.steps == 3:
                _misbehave(fault, session, optimizer)
        if fault == "ends":
            break
        if session.should_stop(math.inf if os.path.exists(enough) else -session.steps, patience=0):
            break
    session.close()
    return {"steps": session.steps, "weights": [value.tolist() for value in model.state_dict().values()]}


def _misbehave(fault: str, session: Session, optimizer: torch.optim.Optimizer) -> None:
    if fault == "rate":
        optimizer.param_groups[0]["lr"] = 0.2
    elif fault == "exit":
        sys.exit(0)  # with another code it would have failed
    elif fault == "detour":
        session.should_stop(1.0, patience=5)
