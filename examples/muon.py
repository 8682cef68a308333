"""Muon for the matrices of the hidden layers, AdamW for the rest: `python examples/muon.py`, or
`paceline run -n 3 examples/muon.py`."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set, valid_set = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])

    hidden = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    model = nn.Sequential(hidden, nn.Linear(128, 10))
    matrices = [parameter for parameter in hidden.parameters() if parameter.ndim == 2]
    rest = [parameter for parameter in model.parameters() if not any(parameter is one for one in matrices)]
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=3e-3)
    session = paceline.Session(model, muon, adamw, data=train_set, global_batch=60, seed=0)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    def validate(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"accuracy": (model(x).argmax(1) == y).float().mean()}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
        scores = session.evaluate(validate, valid_set)
        session.score(scores["accuracy"], mode="max")
        if session.is_main:
            print(f"epoch {epoch.number}: loss {loss:.4f}, validation accuracy {scores['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
