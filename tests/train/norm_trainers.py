"""Trainings with BatchNorm, whose layers see the global batch or a worker's own share."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.testing.rehearsal import say, worker_number
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import Numbered

LENGTH = 82  # the last batch of an epoch has two samples, fewer than there are workers
BATCH = 20


class Normalised(nn.Module):
    """Batch statistics with and without parameters, over samples and over positions, and a mean that is far off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.mix = nn.Conv1d(4, 4, 3, padding=1)
        self.over = nn.BatchNorm1d(4, momentum=None)
        self.bare = nn.BatchNorm1d(16, affine=False, track_running_stats=False)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x) + 50.0))
        x = F.relu(self.over(self.mix(x.view(-1, 4, 4)))).flatten(1)
        out: torch.Tensor = self.last(self.bare(x))
        return out


Spoiled = Callable[[Session, Normalised], None]


def _nothing(_: Session, __: Normalised) -> None:
    pass


def train(
    epochs: int = 2,
    *,
    in_loss: Spoiled = _nothing,
    on_forward: Spoiled = _nothing,
    weight: bool = False,
    catches: str = "",
    **options: Any,
) -> dict[str, Any]:
    """`on_forward` is called between the first two layers with batch statistics."""
    torch.manual_seed(7)
    model = Normalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = Session(
        *(model, optimizer),
        data=Numbered(LENGTH),
        global_batch=BATCH,
        seed=3,
        checkpoints=Checkpoints(every_s=None),
        **options,
    )
    model.mix.register_forward_hook(lambda *_: on_forward(session, model) if model.training else None)

    def loss_fn(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> Any:
        in_loss(session, model)
        try:
            logits = model(x)
        except Exception as error:
            if catches == "wraps":
                raise RuntimeError("the model failed") from error
            if catches != "hides":
                raise
            logits = model.last(torch.zeros(len(x), 16))
        loss = F.cross_entropy(logits, y)
        return (loss, 2.5 * len(x)) if weight else loss

    @torch.no_grad()
    def validate(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> dict[str, Any]:
        model.eval()
        try:
            return {"loss": F.cross_entropy(model(x), y)}
        finally:
            model.train()

    losses, scores = [], []
    for epoch in session.epochs(epochs):
        for batch in epoch:
            losses.append(session.step(loss_fn, batch))
            say((session.steps, session.world_size))
        scores.append(session.evaluate(validate, Numbered(50))["loss"])
    session.close()
    assert "forward" not in vars(model.norm), "the layer is no longer what it was"
    return {
        "losses": losses,
        "scores": scores,
        "state": {name: tensor.tolist() for name, tensor in model.state_dict().items()},
    }


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def die_between_layers(session: Session, _: Normalised) -> None:
    """Worker 1, in step 4, when the others are on their way to the second exchange."""
    if worker_number() == 1 and session.steps == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def call_once_more(session: Session, model: Normalised) -> None:
    if worker_number() == 1 and session.steps == 2:
        model.bare(torch.randn(4, 16))


def call_another(session: Session, model: Normalised) -> None:
    """A layer of the same width, before the one that the others are at."""
    if worker_number() == 1 and session.steps == 2:
        model.bare(torch.randn(4, 16))
    else:
        model.norm(torch.randn(4, 16))


def run_out_of_memory(session: Session, _: Normalised) -> None:
    if worker_number() == 1 and session.steps == 2:
        torch.empty(1 << 60, dtype=torch.uint8)
