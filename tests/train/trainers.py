"""Small trainings for tests: linear data, a tiny model, and a note of every sample that was committed.

The model counts its samples in its weights: the *tally* gets the share of each sample in its batch, by an optimizer of
its own. So what the dead contributed is known too: it is in the survivors' weights, once, or the test fails.
"""

from __future__ import annotations

import hashlib
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from paceline.control.messages.plan import NOTHING
from paceline.control.shell import client
from paceline.data.order import Orders
from paceline.testing import faults
from paceline.testing.eventually import eventually
from paceline.testing.rehearsal import say
from paceline.train import transfer
from paceline.train.loops.steps import Step
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

LENGTH = 203
BATCH = 16
SEED = 3


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


class WithBallast(nn.Module):
    """Takes a while to send."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make_model()
        self.ballast = nn.Parameter(torch.zeros(2_000_000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(x) + 0.0 * self.ballast[:3]
        return out


def train_with_held_transfers(go_on: str, *arguments: Any) -> dict[str, Any]:
    """Says ("giving", rank) in the middle of each transfer of state, and waits there for a file of this name."""

    def hold(rank: int) -> None:
        if not os.path.exists(go_on):
            say(("giving", rank))
            eventually(lambda: os.path.exists(go_on), "the transfer may go on")

    faults.arm(transfer.SENDING, hold)
    return train(*arguments, make=WithBallast)


def train_with_a_laggard(go_on: str, *arguments: Any) -> dict[str, Any]:
    """In operation 5 the main worker sees the reduction complete, as the others do; then it waits, and goes on when it
    has heard that its plan is over, so that the operation counts for the others only."""
    attempt = Step.attempt

    def late(step: Step, place: Any) -> Any:
        rows = attempt(step, place)
        if place.operation == 5 and place.rank == 0 and not os.path.exists(go_on):
            say(("behind", place.operation))
            ends_at = time.monotonic() + 30.0
            while step._loop._joined.client.look(lambda machine: machine.plan) and time.monotonic() < ends_at:
                time.sleep(0.001)
        return rows

    Step.attempt = late  # type: ignore[method-assign, assignment]
    return train(*arguments)


def train_and_kill_the_donor(founder: str, *arguments: Any) -> dict[str, Any]:
    """The first worker to come leaves its number in a file; the next one kills it as soon as it has done a step, before
    anybody can be told of that step."""

    def in_body(session: Session) -> None:
        try:
            with open(founder, "x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            with open(founder) as file:
                pid = int(file.read())
            if pid != os.getpid() and session.world_size == 2:
                os.kill(pid, signal.SIGKILL)

    return train(*arguments, in_body=in_body)


def train_unheard_until_a_checkpoint(founder: str, *arguments: Any) -> dict[str, Any]:
    """The first worker to come sends no rows, and dies when there is a checkpoint."""
    try:
        with open(founder, "x"):
            pass
        faults.arm(client.SAYING, lambda _, kind: kind == "progress")
        is_first = True
    except FileExistsError:
        is_first = False

    def in_body(session: Session) -> None:
        if is_first and session._parts.saver.newest_name() > NOTHING:
            os.kill(os.getpid(), signal.SIGKILL)

    return train(*arguments, in_body=in_body, checkpoints=Checkpoints(every_s=None, every_steps=20))


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """A fingerprint of all bits of the training state."""
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode())
    return found.hexdigest()[:16]


Hook = Callable[[Session], None]


def _nothing(_: Session) -> None:
    pass


def train(
    epochs: int = 3,
    pause_s: float = 0.01,
    enough: str = "",
    *,
    make: Callable[[], nn.Module] = make_model,
    in_loss: Hook = _nothing,
    in_validate: Hook = _nothing,
    in_body: Hook = _nothing,
    before_decision: Hook = _nothing,
    before_close: Hook = _nothing,
    **options: Any,
) -> dict[str, Any]:
    """Says (steps, workers, loss) after every step; returns the samples it contributed and the digest of what came out.
    With `enough`, it goes on for as many epochs as it takes until there is a file of that name. The hooks are called
    on every worker at that place of the script."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tally = nn.Parameter(torch.zeros(LENGTH))
    model.register_parameter("tally", tally)
    counting = torch.optim.SGD([tally], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    data = Numbered()
    options.setdefault("checkpoints", Checkpoints(every_s=None))
    session = Session(model, optimizer, counting, schedule, data=data, global_batch=BATCH, seed=SEED, **options)
    attempt: list[int] = []
    committed: list[tuple[int, int, list[int]]] = []
    scores: list[dict[str, Any]] = []
    losses: dict[int, float] = {}

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        attempt[:] = numbers.tolist()
        in_loss(session)
        time.sleep(pause_s)
        mine = tally[numbers]
        return F.cross_entropy(model(x), y) - (mine - mine.detach()).mean()  # which changes the gradient only

    def validate(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
        in_validate(session)
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    for epoch in session.epochs(1000 if enough else epochs):
        for batch in epoch:
            attempt.clear()
            loss = session.step(loss_fn, batch)
            losses[session.steps] = loss
            schedule.step()
            session.state["bodies"] = session.state.get("bodies", 0) + 1
            committed.append((epoch.number, session.steps, sorted(attempt)))
            say((session.steps, session.world_size, loss))
            in_body(session)
        scores.append(session.evaluate(validate, data))
        before_decision(session)
        is_enough = bool(enough) and os.path.exists(enough)  # what the main worker sees counts for all
        if session.should_stop(math.inf if is_enough else -float(session.steps), patience=0):
            break
    before_close(session)
    session.close()
    return {
        "pid": os.getpid(),
        "committed": committed,
        "digest": digest(model, optimizer),
        "lr": optimizer.param_groups[0]["lr"],
        "schedule": schedule.state_dict()["last_epoch"],
        "state": dict(session.state),
        "bodies": session.state["bodies"],
        "steps": session.steps,
        "scores": scores,
        "tally": tally.tolist(),
        "losses": losses,
        "weights": torch.cat([tensor.flatten() for tensor in model.state_dict().values()]).tolist(),
    }


def check_samples(results: list[dict[str, Any]], epochs: int, *, lost: bool = False) -> None:
    """Per epoch the committed samples are the data, each once. With `lost`, what the dead contributed is missing in
    what the survivors noted; what their weights counted must be complete all the same."""
    for epoch in range(epochs):
        seen = Counter(
            number for result in results for at, _, numbers in result["committed"] if at == epoch for number in numbers
        )
        assert not [number for number, count in seen.items() if count > 1]
        if not lost:
            assert sorted(seen) == list(range(LENGTH))
    for result in results:
        if "tally" in result:
            check_tally(result["tally"], epochs)


def check_tally(tally: list[float], epochs: int) -> None:
    """Every sample counted once an epoch, with its share of the batch it was in."""
    orders = Orders(seed=SEED, length=LENGTH, shuffle=True, order=None)
    expected = [0.0] * LENGTH
    for epoch in range(epochs):
        for start in range(0, LENGTH, BATCH):
            stop = min(start + BATCH, LENGTH)
            for number in orders.slice(epoch, start, stop):
                expected[int(number)] += 1 / (stop - start)
    least = 1 / BATCH
    wrong = {
        number: (tally[number] - expected[number]) / least
        for number in range(LENGTH)
        if abs(tally[number] - expected[number]) > 0.01 * least
    }
    assert not wrong, f"counted too often (+) or too rarely (-), by sample: {wrong}"


def check_alike(results: list[dict[str, Any]]) -> None:
    """Bitwise equal survivors."""
    for what in ("digest", "lr", "schedule", "state", "bodies", "steps", "weights"):
        first, *others = [result[what] for result in results]
        assert all(other == first for other in others), what
    assert results[0]["bodies"] == results[0]["steps"] == results[0]["schedule"]
