"""How small a share of the global batch may be where a model has BatchNorm: validation over seeds, by shares.

Each worker normalises by the samples of its own share, so a small share gives noisy statistics. A small CNN learns the
digits of scikit-learn with a global batch of 32, alone and with two to eight workers. Every seed has its own initial
weights and order of samples; all shares of a seed start from the same weights and see the same global batches.

The workers are simulated in one process: each share is computed by itself, gradients are added up by samples / 32, and
running statistics become the mean over shares weighted by samples, as the strategy does it (strategy/buffers.py).
`--check` makes one epoch with real workers too, and compares.

Two models: one with BatchNorm after its convolutions, where a sample gives up to 64 values to each mean, and one with
BatchNorm after a linear layer as well, where a sample gives one.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as functional
from rich.table import Table
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common import Benchmark, Found, Option, models
from paceline.control.machines.coordinator_events import RunSettings
from paceline.data.order import Orders
from paceline.data.split import split
from paceline.testing.rehearsal import Died, Rehearsal
from paceline.train.session import Session

BATCH = 32
FEWEST = 2  # BatchNorm raises on one sample
NUM_TRAINED = 1500  # of 1797; the others validate
WAIT_S = 120.0
ALONE = (32,)
SHARES: tuple[tuple[int, ...], ...] = (
    *(ALONE, (16, 16), (8, 24), (6, 26), (4, 28), (3, 29), (2, 30)),
    *((11, 11, 10), (8, 8, 16), (4, 4, 24), (2, 2, 28)),
    *((8,) * 4, (4,) * 8),
)


def plain() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 10)),
    )


def headed() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)),
    )


MODELS = {"after convolutions": plain, "also after a linear layer": headed}


class Score(NamedTuple):
    """Of a validation after the last step."""

    loss: float
    accuracy: float


class Digits(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor

    @property
    def trained(self) -> TensorDataset:
        return TensorDataset(self.images[:NUM_TRAINED], self.labels[:NUM_TRAINED])


def load_data() -> tuple[Digits, str]:
    images, labels, source = models.digits()
    shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return Digits(images[shuffled], labels[shuffled]), source


def build(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = MODELS[name]()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


# -- simulated ---------------------------------------------------------------------------------------------------------


def train(name: str, shares: Sequence[int], seed: int, epochs: int, digits: Digits) -> nn.Module:
    model, optimizer = build(name, seed)
    orders = Orders(seed=seed, length=NUM_TRAINED, shuffle=True, order=None)
    for epoch in range(epochs):
        for start in range(0, NUM_TRAINED, BATCH):
            chosen = list(orders.slice(epoch, start, min(start + BATCH, NUM_TRAINED)))
            optimizer.zero_grad()
            step(model, shares, digits.images[chosen], digits.labels[chosen])
            optimizer.step()
    return model


def step(model: nn.Module, shares: Sequence[int], images: torch.Tensor, labels: torch.Tensor) -> None:
    """Gradients and running statistics as workers with these shares have them together."""
    before = [buffer.clone() for buffer in model.buffers()]
    sums = [torch.zeros_like(buffer) for buffer in before]
    for part in split(len(images), shares, FEWEST):
        if not part:
            continue
        fraction = len(part) / len(images)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        chosen = slice(part.start, part.stop)
        loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
        (loss * fraction).backward()  # type: ignore[no-untyped-call]
        for total, buffer in zip(sums, model.buffers(), strict=True):
            total.copy_(total + buffer * fraction if buffer.is_floating_point() else buffer)
    for buffer, total in zip(model.buffers(), sums, strict=True):
        buffer.copy_(total)


@torch.no_grad()
def validate(model: nn.Module, digits: Digits) -> Score:
    model.eval()
    logits, labels = model(digits.images[NUM_TRAINED:]), digits.labels[NUM_TRAINED:]
    correct = (logits.argmax(1) == labels).double().mean()
    return Score(float(functional.cross_entropy(logits, labels)), float(correct))


# -- real workers ------------------------------------------------------------------------------------------------------


def work(name: str, seed: int, epochs: int, folder: str) -> dict[str, Any]:
    stored = torch.load(f"{folder}/data.pt")
    model, optimizer = build(name, seed)
    digits = Digits(stored["images"], stored["labels"])
    session = Session(model, optimizer, data=digits.trained, global_batch=BATCH, seed=seed)

    def loss_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(model(images), labels)

    for epoch in session.epochs(epochs):
        for batch in epoch:
            session.step(loss_fn, batch)
    session.close()
    return {key: tensor.numpy() for key, tensor in model.state_dict().items()}


def difference(name: str, shares: tuple[int, ...], seed: int, digits: Digits) -> float:
    """The largest of any tensor's max |a - b| / max |b| between real workers and simulated ones, after an epoch."""
    with tempfile.TemporaryDirectory(prefix="paceline-batch-norm-") as folder:
        torch.save(digits._asdict(), f"{folder}/data.pt")
        arguments = (work, name, seed, 1, folder)
        size = len(shares)
        settings = RunSettings(wanted=size, fewest=size, most=size, shares=shares)
        with Rehearsal(*arguments, workers=size, folder=Path(folder), settings=settings) as run:
            results = run.finish(range(size), WAIT_S)
    if died := [result for result in results if isinstance(result, Died)]:
        raise RuntimeError(f"a worker did not come to the end: {died}")
    expected = train(name, shares, seed, 1, digits).state_dict()
    return max(
        float((torch.from_numpy(results[0][key]).double() - tensor.double()).abs().max() / tensor.double().abs().max())
        for key, tensor in expected.items()
    )


# -- the table ---------------------------------------------------------------------------------------------------------


def summary(shares: tuple[int, ...], scores: Sequence[Score], alone: Sequence[Score]) -> dict[str, Any]:
    """Means over seeds, and the mean difference from alone with its standard error: seeds are compared one by one."""
    found: dict[str, Any] = {"shares": list(shares), "smallest": min(shares)}
    for field in Score._fields:
        values = [getattr(score, field) for score in scores]
        excess = [value - getattr(other, field) for value, other in zip(values, alone, strict=True)]
        found[field] = statistics.fmean(values)
        found[f"{field}_worst"] = max(values) if field == "loss" else min(values)
        found[f"{field}_against_alone"] = statistics.fmean(excess)
        found[f"{field}_standard_error"] = statistics.stdev(excess) / math.sqrt(len(excess))
    found["by_seed"] = [list(score) for score in scores]
    return found


def scores_of(name: str, options: argparse.Namespace, digits: Digits) -> list[dict[str, Any]]:
    seeds, epochs = options.seeds, options.epochs
    scores: dict[tuple[int, ...], list[Score]] = {shares: [] for shares in SHARES[: options.layouts]}
    began = time.monotonic()
    for seed in range(seeds):
        for shares, found in scores.items():
            found.append(validate(train(name, shares, seed, epochs, digits), digits))
        print(f"{name}: seed {seed + 1} of {seeds}, {time.monotonic() - began:.0f} s", flush=True)
    return [summary(shares, found, scores[ALONE]) for shares, found in scores.items()]


def tabulate(name: str, rows: Sequence[dict[str, Any]], seeds: int) -> Table:
    columns = ("shares of 32", "loss", "against alone", "worst", "accuracy", "against alone", "worst")
    table = Table(*columns, title=f"BatchNorm {name}, {seeds} seeds, ± standard error")
    for row in rows:
        table.add_row(
            ":".join(map(str, row["shares"])),
            f"{row['loss']:.4f}",
            f"{row['loss_against_alone']:+.4f} ± {row['loss_standard_error']:.4f}",
            f"{row['loss_worst']:.4f}",
            f"{row['accuracy']:.2%}",
            f"{row['accuracy_against_alone'] * 100:+.2f} ± {row['accuracy_standard_error'] * 100:.2f}",
            f"{row['accuracy_worst']:.2%}",
        )
    return table


def measure(options: argparse.Namespace) -> Found:
    torch.set_num_threads(1)
    digits, source = load_data()
    record: dict[str, Any] = {"data": source, "seeds": options.seeds, "epochs": options.epochs}
    if options.check:
        record["real_workers_differ_by"] = {
            f"{name}, {':'.join(map(str, shares))}": difference(name, shares, 0, digits)
            for name in MODELS
            for shares in ((4, 28), (4, 4, 24))
        }
    record["rows"] = {name: scores_of(name, options, digits) for name in MODELS}
    tables = [tabulate(name, rows, options.seeds) for name, rows in record["rows"].items()]
    return Found(record, [*tables, f"real workers differ by {record.get('real_workers_differ_by', 'was not asked')}"])


def check(options: argparse.Namespace) -> str:
    return "" if options.seeds >= 2 else f"--seeds {options.seeds}: 2 or more, so that there is a standard error"


BENCHMARK = Benchmark(
    __doc__,
    "batch-norm",
    measure,
    options=[
        Option("--seeds", 12, quick=2),
        Option("--epochs", 4, quick=1, help="of 47 steps each"),
        Option("--layouts", len(SHARES), quick=3, help="of shares; the first is one process"),
        Option("--check", False, quick=False, help="compare with real workers as well"),
    ],
    check=check,
)


if __name__ == "__main__":
    BENCHMARK.main()
