"""LoRA with PEFT: a network that knows digits learns to read them turned by 90 degrees. Only the adapter is trained,
and only the adapter is in the checkpoints. `pip install peft`, then `paceline run -n 3 examples/lora.py`."""

from __future__ import annotations

import argparse

import peft
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def train_base(images: torch.Tensor, labels: torch.Tensor) -> nn.Module:
    """In place of a model that is downloaded: every worker must have the same one."""
    torch.manual_seed(0)
    hidden = (nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
    base = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(base(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return base


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go if this is not a run of `paceline run`")
    options = parser.parse_args()

    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    base = train_base(images[:1500], labels[:1500])
    turned = images.rot90(dims=(1, 2))
    train_set, valid_set = TensorDataset(turned[:1500], labels[:1500]), TensorDataset(turned[1500:], labels[1500:])

    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules=["1", "3"], modules_to_save=["5"]))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=5e-3)
    checkpoints = paceline.Checkpoints(folder=options.folder, only_trained=True)
    session = paceline.Session(model, optimizer, data=train_set, global_batch=60, checkpoints=checkpoints)

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
    # For others who use PEFT: model.save_pretrained("adapter")


if __name__ == "__main__":
    main()
