"""Fashion-MNIST from a folder with its four files (Debian has them in the package dataset-fashion-mnist):
`paceline run -n 2 examples/fashion.py FOLDER`."""

from __future__ import annotations

import argparse
import gzip
import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import paceline


def read_idx(folder: Path, name: str) -> torch.Tensor:
    """An array in the IDX format of the MNIST family, packed or not."""
    path = next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)
    if path is None:
        raise SystemExit(f"{folder} has no {name} or {name}.gz; give the folder with the four files of Fashion-MNIST")
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    _, kind, dimensions = struct.unpack_from(">HBB", content)
    if kind != 8:
        raise SystemExit(f"{path} is not an IDX file of bytes")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape).copy())


def load(folder: Path, split: str) -> TensorDataset:
    images = read_idx(folder, f"{split}-images-idx3-ubyte").float().unsqueeze(1) / 255
    return TensorDataset(images, read_idx(folder, f"{split}-labels-idx1-ubyte").long())


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=256)
    options = parser.parse_args()

    train_set, valid_set = load(options.folder, "train"), load(options.folder, "t10k")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    session = paceline.Session(model, optimizer, data=train_set, global_batch=options.batch, seed=0, clip_norm=5.0)

    def loss_fn(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(images), labels)

    def validate(images: torch.Tensor, labels: torch.Tensor) -> dict[str, object]:
        logits = model(images)
        right = (logits.argmax(1) == labels).sum()
        return {"loss": F.cross_entropy(logits, labels), "right": paceline.Total(right)}

    for epoch in session.epochs(options.epochs):
        for batch in epoch:
            session.step(loss_fn, batch)
        scores = session.evaluate(validate, valid_set)
        if session.is_main:
            print(f"epoch {epoch.number}: {scores['right']:.0f} of {len(valid_set)} right", flush=True)


if __name__ == "__main__":
    main()
