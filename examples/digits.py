"""Handwritten digits from scikit-learn: alone with `python examples/digits.py`, on 3 workers with
`paceline run -n 3 examples/digits.py`."""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline

BATCH = 60


def load() -> tuple[TensorDataset, TensorDataset]:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, valid = order[:1500], order[1500:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[valid], labels[valid])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step, to have time to look")
    parser.add_argument("--hurry", type=Path, metavar="FILE", help="wait no more once this file is there")
    options = parser.parse_args()

    torch.manual_seed(0)
    train_set, valid_set = load()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 16, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * math.ceil(len(train_set) / BATCH))
    session = paceline.Session(model, optimizer, schedule, data=train_set, global_batch=BATCH, seed=0)

    def loss_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if options.hurry is None or not options.hurry.exists():
            time.sleep(options.pause)
        return F.cross_entropy(model(images), labels)

    def validate(images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = model(images)
        return {"loss": F.cross_entropy(logits, labels), "accuracy": (logits.argmax(1) == labels).float().mean()}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            schedule.step()
        scores = session.evaluate(validate, valid_set)
        if session.is_main:
            print(f"epoch {epoch.number}: loss {loss:.4f}, validation accuracy {scores['accuracy']:.4f}", flush=True)
        if session.should_stop(scores["loss"], patience=3):
            break


if __name__ == "__main__":
    main()
