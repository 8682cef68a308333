"""Scripts for tests of a session's steps: each returns what a test compares between workers and with plain torch."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from paceline.data.loader import LoaderOptions
from paceline.data.order import EpochOrder
from paceline.testing.rehearsal import say
from paceline.train.evaluation import Every, Total
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import Numbered

SEED = 11
FEW = 5  # samples of the small data


class Odd(nn.Module):
    """Tied weights, a parameter that nobody uses, one that only samples with an even number use, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.enter.weight
        self.even = nn.Linear(8, 3)
        self.leave = nn.Linear(8, 3)
        self.unused = nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.again(torch.tanh(self.frozen(self.enter(x)))))
        out: torch.Tensor = self.leave(h)
        even = number % 2 == 0
        if even.any():
            out = out + self.even(h) * even[:, None]
        return out


def make_odd() -> tuple[Odd, list[torch.optim.Optimizer], Any]:
    torch.manual_seed(1)
    model = Odd()
    first = torch.optim.AdamW([*model.enter.parameters(), model.again.bias, *model.unused.parameters()], lr=2e-2)
    second = torch.optim.SGD([*model.even.parameters(), *model.leave.parameters()], lr=1e-1, momentum=0.9)
    return model, [first, second], torch.optim.lr_scheduler.StepLR(first, 2, 0.5)


def as_dict(samples: list[Any]) -> dict[str, torch.Tensor]:
    return {
        "x": torch.stack([sample[0] for sample in samples]),
        "y": torch.stack([sample[1] for sample in samples]),
        "number": torch.tensor([sample[2] for sample in samples]),
    }


def backwards(seed: int, epoch: int, length: int) -> list[int]:
    """An order of the user's own."""
    return list(reversed(range(length)))


def weights_of(model: nn.Module) -> list[float]:
    return torch.cat([tensor.detach().flatten().double() for tensor in model.state_dict().values()]).tolist()


def odd_steps(length: int, batch: int, epochs: int) -> dict[str, Any]:
    model, optimizers, schedule = make_odd()
    session = Session(
        model,
        *optimizers,
        schedule,
        data=Numbered(length),
        global_batch=batch,
        seed=SEED,
        loader=LoaderOptions(collate_fn=as_dict),
        micro_batch=1,
        clip_norm=0.1,
        checkpoints=Checkpoints(every_s=None),
    )

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch["x"], batch["number"]), batch["y"])

    losses = []
    with session:
        for epoch in session.epochs(epochs):
            for one in epoch:
                losses.append(session.step(loss_fn, one))
                schedule.step()
    grads = [
        name for name, parameter in model.named_parameters() if name.startswith("unused") and parameter.grad is not None
    ]
    return {"weights": weights_of(model), "losses": losses, "unused": grads, "steps": session.steps}


def reference_odd_steps(length: int, batch: int, epochs: int) -> dict[str, Any]:
    """The same in plain torch."""
    model, optimizers, schedule = make_odd()
    data = Numbered(length)
    losses = []
    for epoch in range(epochs):
        order = EpochOrder(SEED, epoch, length)
        for start in range(0, length, batch):
            indices = order.slice(start, min(start + batch, length))
            one = as_dict([data[int(index)] for index in indices])
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = F.cross_entropy(model(one["x"], one["number"]), one["y"])
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return {"weights": weights_of(model), "losses": losses}


class Statistics(nn.Module):
    """Batch statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def statistics_steps() -> dict[str, Any]:
    """Five samples a step and one in the last, in half precision where torch likes, with a loss that is not finite in
    the third step of worker 1."""
    torch.manual_seed(2)
    model = Statistics()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sizes: list[int] = []
    session = Session(
        model,
        optimizer,
        data=Numbered(27),
        global_batch=5,
        seed=SEED,
        nonfinite="skip",
        checkpoints=Checkpoints(every_s=None),
    )

    def loss_fn(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        if session.steps == 2 and session.rank == 1:
            loss = loss * float("nan")
        return loss

    def validate(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> dict[str, Any]:
        return {"loss": F.cross_entropy(model(x), y)}

    losses = []
    was_main = session.is_main
    with session:
        for epoch in session.epochs(1):
            for one in epoch:
                if session.num_steps_per_epoch - session.steps > 1:  # batch statistics of one sample cannot be had
                    losses.append(session.step(loss_fn, one))
                else:
                    losses.append(session.step(lambda x, y, number: F.cross_entropy(model.eval()(x), y), one))
                    model.train()
        score = session.evaluate(validate, Numbered(27))
    return {
        "weights": weights_of(model),
        "losses": losses[:2] + losses[3:],
        "skipped": session.skipped,
        "sizes": sizes,
        "was_main": was_main,
        "score": score,
    }


def explode(session: Session) -> bool:
    return session.steps == 2 and session.rank == 1


def nonfinite_steps() -> None:
    model = nn.Linear(8, 3)
    session = Session(model, torch.optim.SGD(model.parameters(), lr=0.1), data=Numbered(40), global_batch=6)

    def loss_fn(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        return loss * float("inf") if explode(session) else loss

    for epoch in session.epochs(1):
        for one in epoch:
            session.step(loss_fn, one)


def staged_script(enough: str) -> dict[str, Any]:
    """Results before, between and after two loops over epochs; a worker that comes late gets those it missed."""
    torch.manual_seed(3)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = Session(
        model, optimizer, data=Numbered(40), global_batch=8, order=backwards, checkpoints=Checkpoints(every_s=None)
    )
    few, data = Numbered(2), Numbered(40)
    seen: list[Any] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def validate(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> dict[str, Any]:
        logits = model(x)
        return {
            "loss": F.cross_entropy(logits, y),
            "right": Total((logits.argmax(1) == y).sum()),
            "all": Every(number),
            "logits": Every(logits),
        }

    def note(scores: dict[str, Any]) -> None:
        seen.append(
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in scores.items()}
        )

    def loop(epochs: int, until: str = "") -> None:
        for epoch in session.epochs(epochs):
            for one in epoch:
                session.step(loss_fn, one)
                session.state.setdefault("numbers", []).append(session.steps)
                say((session.steps, session.world_size))
            is_enough = bool(until) and os.path.exists(until)
            if session.should_stop(math.inf if is_enough else -float(session.steps), patience=0):
                break

    session.state["greeting"] = "hello"
    note(session.evaluate(validate, few))
    loop(1)
    note(session.evaluate(validate, data, batch=7))
    seen.append(session.score(-5.5))
    seen.append(session.should_stop(0.0, patience=5))
    loop(1000, enough)
    note(session.evaluate(validate, data))
    session.close()
    return {"seen": seen, "state": dict(session.state), "weights": weights_of(model), "steps": session.steps}


def reference_scores(weights: list[float], length: int) -> dict[str, Any]:
    """What `staged_script` should have found with these weights."""
    model = nn.Linear(8, 3)
    flat = torch.tensor(weights, dtype=torch.float64).float()
    model.load_state_dict({"weight": flat[:24].view(3, 8), "bias": flat[24:]})
    data = Numbered(length)
    x, y = torch.stack([data[n][0] for n in range(length)]), torch.stack([data[n][1] for n in range(length)])
    with torch.no_grad():
        logits = model(x)
    return {
        "loss": F.cross_entropy(logits, y).item(),
        "right": float((logits.argmax(1) == y).sum()),
        "all": list(range(length)),
        "logits": logits.tolist(),
    }


def loader_steps(enough: str) -> dict[str, Any]:
    """With loader workers of its own."""
    from tests.train.trainers import train

    return train(0, 0.005, enough, loader=LoaderOptions(num_workers=2))
