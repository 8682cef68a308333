"""Trainings of a model with dense layers and sparse tables, which end alike wherever its parameters are."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from paceline.data.loader import LoaderOptions
from paceline.nn import Embedding, EmbeddingBag
from paceline.strategy.served_rows import ServedRows
from paceline.testing import faults
from paceline.testing.rehearsal import say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

LENGTH = 90
BATCH = 16
NUM_USERS = 40
STEPS = -(-LENGTH // BATCH)  # of an epoch


class Ratings(Dataset[tuple[torch.Tensor, ...]]):
    """Numbers, a user, a bag of three items, what came of it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(LENGTH, 4, generator=generator)
        self._users = torch.randint(0, NUM_USERS, (LENGTH,), generator=generator) * 10**15 - 3
        self._items = torch.randint(0, 25, (LENGTH, 3), generator=generator)
        self._y = torch.randn(LENGTH, generator=generator)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return self._x[index], self._users[index], self._items[index], self._y[index], torch.tensor(index)


class Model(nn.Module):
    """Tables, a layer large enough to be cut, one that some steps do not use, one that none uses, a frozen one."""

    def __init__(self, *, has_statistics: bool = False, tables: tuple[tuple[str, int], ...] = ()) -> None:
        super().__init__()
        options: dict[str, Any] = dict(tables)
        self.users = Embedding(4, init="uniform", **options)
        self.items = EmbeddingBag(4, name="goods", mode="sum", scale=0.1, **options)
        self.enter = nn.Linear(12, 1500)
        self.statistics = nn.BatchNorm1d(1500) if has_statistics else nn.Identity()
        self.leave = nn.Linear(1500, 1)
        self.at_times = nn.Linear(4, 1)
        self.unused = nn.Linear(3, 3)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor, users: torch.Tensor, items: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.frozen(x), self.users(users), self.items(items)], 1)
        out: torch.Tensor = self.leave(torch.tanh(self.statistics(self.enter(h))))[:, 0]
        chosen = number < 12
        if chosen.any():
            out = out + self.at_times(x)[:, 0] * chosen
        return out


class Case(NamedTuple):
    """What a training is like."""

    strategy: str = "server"
    optimizer: str = "adamw"
    epochs: int = 3
    pause_s: float = 0.0
    clip_norm: float | None = None
    micro_batch: int | None = None
    is_weighted: bool = False
    has_statistics: bool = False
    every_steps: int | None = None
    bad_step: int = 0  # its gradient is not finite, and it is skipped
    freezes_at: int = 0  # a layer is frozen after this step
    enough: str = ""  # go on until there is a file of this name
    consistency: str = "sync"
    decay: float = 0.8  # of the learning rate, every two steps
    prefetches: bool = False
    is_far: bool = False  # as if servers were on other hosts
    loader_workers: int = 0
    tables: tuple[tuple[str, int], ...] = ()  # options of both


def optimizers_of(model: Model, name: str) -> list[torch.optim.Optimizer]:
    tables = [model.users.weight, model.items.weight]
    dense = [one for one in model.parameters() if not any(one is table for table in tables)]
    if name == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)]
    if name == "momentum":
        groups = [{"params": tables, "lr": 0.02}, {"params": dense, "weight_decay": 0.01}]
        return [torch.optim.SGD(groups, lr=5e-3, momentum=0.9)]
    assert name == "adagrad and nadam"
    return [torch.optim.Adagrad(tables, lr=0.1), torch.optim.NAdam(dense, lr=1e-3)]


def train(case: Case) -> dict[str, Any]:
    """Says (steps, loss) after every step; returns the losses, the parameters, and the rows of all users."""
    with faults.on_host("far") if case.is_far and not is_alone[0] else contextlib.nullcontext():
        return _train(case)


def _train(case: Case) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Model(has_statistics=case.has_statistics, tables=case.tables)
    optimizers = optimizers_of(model, case.optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizers[0], 2, case.decay)
    session = Session(
        model,
        *optimizers,
        schedule,
        data=Ratings(),
        global_batch=BATCH,
        seed=3,
        strategy=case.strategy,  # type: ignore[arg-type]
        clip_norm=case.clip_norm,
        micro_batch=case.micro_batch,
        nonfinite="skip",
        consistency=case.consistency,
        loader=LoaderOptions(num_workers=case.loader_workers),
        checkpoints=Checkpoints(every_s=None, every_steps=case.every_steps),
    )
    losses: list[float] = []
    if case.prefetches:
        session.prefetch(lambda batch: {model.users: batch[1], model.items: batch[2]})

    def loss_fn(
        x: torch.Tensor, users: torch.Tensor, items: torch.Tensor, y: torch.Tensor, number: torch.Tensor
    ) -> Any:
        time.sleep(case.pause_s)
        found = F.mse_loss(model(x, users, items, number), y, reduction="none")
        if session.steps + 1 == case.bad_step and bool((number >= LENGTH // 2).any()):
            found = found * math.inf
        if case.is_weighted:
            weights = 1.0 + (number % 3)
            return (found * weights).sum() / weights.sum(), float(weights.sum())
        return found.mean()

    def validate(*batch: torch.Tensor) -> dict[str, Any]:
        x, users, items, y, number = batch
        return {"loss": F.mse_loss(model(x, users, items, number), y)}

    scores = []
    with session:
        for epoch in session.epochs(10**6 if case.enough else case.epochs):
            for batch in epoch:
                losses.append(session.step(loss_fn, batch))
                schedule.step()
                if session.steps == case.freezes_at:
                    model.at_times.requires_grad_(False)
                _say((session.steps, losses[-1]))
            scores.append(session.evaluate(validate, Ratings())["loss"])
            if session.should_stop(math.inf if _exists(case.enough) else -float(session.steps), patience=0):
                break
        users = torch.arange(NUM_USERS) * 10**15 - 3
        with torch.no_grad():
            rows = model.users(users).tolist(), model.items(torch.arange(25)[:, None]).tolist()
    return {
        "losses": losses,
        "steps": session.steps,
        "skipped": session.skipped,
        "schedule": schedule.last_epoch,
        "scores": scores,
        "rows": rows,
        "taken": num_taken[0],
        "parameters": {name: value.tolist() for name, value in model.state_dict().items()},
    }


def _exists(path: str) -> bool:
    return bool(path) and os.path.exists(path)


def _say(value: Any) -> None:
    if not is_alone[0]:
        say(value)


is_alone = [False]
num_taken = [0]  # batches whose rows were there before they were asked for


def _count_taken(take: Callable[[ServedRows], Any]) -> Callable[[ServedRows], Any]:
    """Rows that are pulled ahead are as good as others: only a count tells them apart."""

    def counted(rows: ServedRows) -> Any:
        found = take(rows)
        num_taken[0] += found is not None
        return found

    return counted


ServedRows.take_ahead = _count_taken(ServedRows.take_ahead)  # type: ignore[assignment, method-assign]


def alone(case: Case, function: Callable[[Case], dict[str, Any]] = train) -> dict[str, Any]:
    """The same in this process."""
    is_alone[0] = True
    try:
        return function(case)
    finally:
        is_alone[0] = False


def check_close(result: dict[str, Any], wanted: dict[str, Any], *, what: str = "") -> None:
    """Equal but for the order in which numbers were added up."""
    assert (result["steps"], result["skipped"]) == (wanted["steps"], wanted["skipped"])
    num = len(result["losses"])  # a worker that came later has the last ones
    for name, found, expected in [
        ("losses", result["losses"], wanted["losses"][-num:]),
        ("scores", result["scores"], wanted["scores"][-len(result["scores"]) :]),
        ("users", result["rows"][0], wanted["rows"][0]),
        ("items", result["rows"][1], wanted["rows"][1]),
        *((name, value, wanted["parameters"][name]) for name, value in result["parameters"].items()),
    ]:
        try:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-4, atol=2e-5)
        except AssertionError as error:
            error.add_note(f"{what} {name}")
            raise


def check_alike(results: list[dict[str, Any]]) -> None:
    """The workers have the same, bit by bit."""
    for other in results[1:]:
        for what in ("steps", "skipped", "rows", "parameters"):
            assert other[what] == results[0][what], what
