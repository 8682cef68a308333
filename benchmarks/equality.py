"""Whether workers that die and join change what is learned: a run with kills and joins against one plain process.

Draws a picture of both loss curves beside the figures (digits-curves.png). The plain process is a bare PyTorch loop
over the same global batches, without sessions or strategies. As a measure of what rounding alone does, both are also
compared with the same loop in double precision.

Difference of parameters: the largest of any tensor's max |a - b| / max |b|. Difference of losses: the largest of any
step's |a - b| / |b|.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common import Benchmark, Found, Option, Target, models, plots
from paceline.control.journal.reader import RunReader
from paceline.data.order import Orders
from paceline.testing.rehearsal import Died, Rehearsal, worker_number
from paceline.train.session import Session
from paceline.watch.audit import audit

PICTURE = "digits-curves.png"  # beside the figures
DRAWN = "digits CNN, AdamW"
BATCH = 60
NUM_SAMPLES = 1500
FAULTS_TO_ALONE, ROUNDING = "with faults : alone", "alone : double precision"
WORKERS = 7  # ten die and five come: two are left
EVENTS = ("kill", "join", "kill") * 5
WAIT_S = 90.0
PAUSE_S = 0.005  # in each step, so that kills hit all parts of it

State = dict[str, torch.Tensor]


class Course(NamedTuple):
    """What came of a training."""

    losses: list[float]
    state: State


# -- what is trained ---------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))


def cnn() -> nn.Module:
    convolution = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*convolution, nn.Linear(16 * 16, 64), nn.ReLU(), nn.Linear(64, 10))


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "MLP, momentum SGD": (mlp, momentum),
    DRAWN: (cnn, adamw),
}


def build(case: str, num_steps: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Any]:
    make_model, make_optimizer = CASES[case]
    torch.manual_seed(0)
    model = make_model().to(dtype)
    optimizer = make_optimizer(model)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)


# -- one plain process -------------------------------------------------------------------------------------------------


def plain(case: str, epochs: int, images: torch.Tensor, labels: torch.Tensor, dtype: torch.dtype) -> Course:
    orders = Orders(seed=0, length=len(images), shuffle=True, order=None)
    num_steps = epochs * math.ceil(len(images) / BATCH)
    model, optimizer, schedule = build(case, num_steps, dtype)
    losses = []
    for epoch in range(epochs):
        for start in range(0, len(images), BATCH):
            chosen = list(orders.slice(epoch, start, min(start + BATCH, len(images))))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[chosen].to(dtype)), labels[chosen])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    return Course(losses, dict(model.state_dict()))


# -- many workers ------------------------------------------------------------------------------------------------------


def train(case: str, epochs: int, folder: str) -> dict[str, Any]:
    """Waits before each step until it is allowed, so that the training does not end before all faults were made."""
    stored = torch.load(f"{folder}/data.pt")
    data = TensorDataset(stored["images"], stored["labels"])
    model, optimizer, schedule = build(case, epochs * math.ceil(len(data) / BATCH))
    session = Session(model, optimizer, schedule, data=data, global_batch=BATCH, seed=0)
    log = os.open(f"{folder}/steps-{worker_number()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    allowed = Path(folder, "allowed")

    def loss_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        time.sleep(PAUSE_S)
        return functional.cross_entropy(model(images), labels)

    for epoch in session.epochs(epochs):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            schedule.step()
            os.write(log, f"{session.steps} {session.world_size} {loss!r}\n".encode())
            while session.steps >= int(allowed.read_text()):
                time.sleep(0.005)
    session.close()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}  # tensors would go by descriptor


class Faulty:
    """A run that is allowed on from one fault to the next."""

    def __init__(self, run: Rehearsal, num_steps: int, rng: random.Random) -> None:
        self._run = run
        self._num_steps = num_steps
        self._rng = rng
        self._living = list(range(WORKERS))

    def allow(self, step: int) -> None:
        allow(self._run.folder, step)

    def go_through(self) -> list[int]:
        """All faults; the numbers of the workers that are left."""
        spacing = self._num_steps // (len(EVENTS) + 1)
        for number, event in enumerate(EVENTS):
            at = (number + 1) * spacing
            self.allow(at + spacing - 1)
            self._wait_reached(at)
            if event == "join":
                self._run.add()
                self._living.append(len(self._run.workers) - 1)
            else:
                time.sleep(self._rng.uniform(0.0, 0.05))
                victim = self._rng.choice(self._living)
                self._run.kill(victim)
                self._living.remove(victim)
            self._wait_size(at)
            print(f"  {event} {number + 1} of {len(EVENTS)} at step {at}, {len(self._living)} workers", flush=True)
        self.allow(1 << 30)
        return self._living

    def _wait_size(self, at: int) -> None:
        """Until all that live have done a step together."""

        def together() -> bool:
            last = [(self._lines(number) or [(0, 0, 0.0)])[-1] for number in self._living]
            return all(step > 0 and size == len(self._living) for step, size, _ in last)

        # Whoever stands at the limit cannot do a step with a newcomer.
        self._run.wait_for(lambda: together() or self._give_room(), WAIT_S)

    def _give_room(self) -> bool:
        reached = self._reached(self._living[0])
        limit = int((self._run.folder / "allowed").read_text())
        if reached >= limit and limit + 1 < self._num_steps:
            self.allow(limit + 1)
        time.sleep(0.05)
        return False

    def _wait_reached(self, step: int) -> None:
        self._run.wait_for(lambda: self._reached(self._living[0]) >= step, WAIT_S)

    def _reached(self, number: int) -> int:
        lines = self._lines(number)
        return lines[-1][0] if lines else 0

    def _lines(self, number: int) -> list[tuple[int, int, float]]:
        path = self._run.folder / f"steps-{number}.log"
        if not path.exists():
            return []
        complete = [text.split() for text in path.read_text().splitlines(keepends=True) if text.endswith("\n")]
        return [(int(step), int(size), float(loss)) for step, size, loss in complete]

    def all_losses(self) -> dict[int, set[float]]:
        """By step, what any worker got."""
        found: dict[int, set[float]] = {}
        for number in range(len(self._run.workers)):
            for step, _, loss in self._lines(number):
                found.setdefault(step, set()).add(loss)
        return found


def allow(folder: Path, step: int) -> None:
    draft = folder / ".allowed"
    draft.write_text(str(step))
    draft.replace(folder / "allowed")


def with_faults(case: str, epochs: int, images: torch.Tensor, labels: torch.Tensor, seed: int) -> tuple[Course, Any]:
    num_steps = epochs * math.ceil(len(images) / BATCH)
    with tempfile.TemporaryDirectory(prefix="paceline-equality-") as name:
        folder = Path(name)
        torch.save({"images": images, "labels": labels}, folder / "data.pt")
        allow(folder, 1)
        with Rehearsal(train, case, epochs, name, workers=WORKERS, folder=folder) as run:
            faulty = Faulty(run, num_steps, random.Random(seed))
            survivors = faulty.go_through()
            results = run.finish(survivors, WAIT_S + num_steps * 0.1)
            losses = faulty.all_losses()
        with RunReader(folder) as reader:
            audited = audit(reader.steps(), len(images), BATCH)
    if died := [result for result in results if isinstance(result, Died)]:
        raise RuntimeError(f"a survivor did not come to the end: {died}")
    states = [{key: torch.from_numpy(array) for key, array in result.items()} for result in results]
    facts = {
        "survivors": len(states),
        "survivors_bitwise_equal": all(
            torch.equal(tensor, state[key]) for state in states for key, tensor in states[0].items()
        ),
        "workers_agree_on_losses": all(len(values) == 1 for values in losses.values()),
        "steps_missing": num_steps - len(losses),
        "audit": list(audited.summary),
        "audit_exact": audited.is_exact,
    }
    return Course([min(losses[step]) for step in sorted(losses)], states[0]), facts


# -- comparing ---------------------------------------------------------------------------------------------------------


def compare(found: Course, reference: Course) -> dict[str, float]:
    parameters = max(
        float((found.state[name].double() - tensor.double()).abs().max() / tensor.double().abs().max())
        for name, tensor in reference.state.items()
    )
    pairs = zip(found.losses, reference.losses, strict=True)
    return {"parameters": parameters, "losses": max(abs(own - other) / abs(other) for own, other in pairs)}


def draw(case: str, faulty: Course, alone: Course, picture: Path | None) -> None:
    if (made := plots.drawing()) is None:
        return
    figure, axes = made
    axes.plot(alone.losses, color="#d95f02", linewidth=3.0, alpha=0.5, label="one process, plain PyTorch")
    axes.plot(faulty.losses, color="#1b4f72", linewidth=0.8, label="Paceline, 10 kills and 5 joins")
    axes.set(xlabel="step", ylabel="loss", yscale="log", title=case)
    plots.keep(figure, axes, picture)


def measure_case(case: str, options: argparse.Namespace, images: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    print(f"{case}:", flush=True)
    faulty, facts = with_faults(case, options.epochs, images, labels, options.seed)
    alone = plain(case, options.epochs, images, labels, torch.float32)
    exact = plain(case, options.epochs, images, labels, torch.float64)
    if case == DRAWN:
        draw(case, faulty, alone, options.json and options.json.with_name(PICTURE))
    differences = {
        FAULTS_TO_ALONE: compare(faulty, alone),
        "with faults : double precision": compare(faulty, exact),
        ROUNDING: compare(alone, exact),
    }
    curves = {"with_faults": faulty.losses, "alone": alone.losses}
    return {"case": case, "differences": differences, **facts, "curves": curves}


def measure(options: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    images, labels, source = models.digits()
    rows = [measure_case(case, options, images[:NUM_SAMPLES], labels[:NUM_SAMPLES]) for case in options.cases]
    table = Table("training", "compared", "parameters", "losses")
    table.title = "largest relative differences, 10 kills and 5 joins"
    for row in rows:
        for what, each in row["differences"].items():
            table.add_row(row["case"], what, f"{each['parameters']:.1e}", f"{each['losses']:.1e}")
    facts = [{key: row[key] for key in row if key not in ("differences", "curves")} for row in rows]
    return Found({"data": source, "rows": rows}, [table, *map(str, facts)])


def of_rounding(record: dict[str, Any]) -> float:
    """How many times what rounding does alone, the largest of any training."""
    differences = [row["differences"] for row in record["rows"]]
    return max(float(each[FAULTS_TO_ALONE]["parameters"] / each[ROUNDING]["parameters"]) for each in differences)


def num_inexact(record: dict[str, Any]) -> float:
    return float(sum(not (row["audit_exact"] and row["survivors_bitwise_equal"]) for row in record["rows"]))


def check(options: argparse.Namespace) -> str:
    return "" if options.epochs >= 8 else f"--epochs {options.epochs}: 8 or more leave room for all faults"


BENCHMARK = Benchmark(
    __doc__,
    "equality",
    measure,
    targets=[
        Target("difference of parameters, in times of rounding's", "one plain process", of_rounding, at_most=1.0),
        Target("trainings whose audit or survivors differ", "one plain process", num_inexact, at_most=0.0),
    ],
    options=[
        Option("--epochs", 20, quick=8, help="of 25 steps each"),
        Option("--cases", list(CASES), quick=[DRAWN], choices=list(CASES)),
        Option("--seed", 0, quick=0),
    ],
    check=check,
)


if __name__ == "__main__":
    BENCHMARK.main()
