"""Networks that several benchmarks train."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import nn

Step = Callable[[], object]


def small_cnn(*, batch_norm: bool = True) -> nn.Module:
    """57 thousand parameters, for images of 28 x 28."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        normed: list[nn.Module] = [nn.BatchNorm2d(outputs)] if batch_norm else []
        return [nn.Conv2d(inputs, outputs, 3, padding=1), *normed, nn.ReLU(), nn.MaxPool2d(2)]

    head = [nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*block(1, 32), *block(32, 64), *head)


def plain_step(
    module: nn.Module, x: torch.Tensor, y: torch.Tensor, optimizer: torch.optim.Optimizer | None = None
) -> Step:
    """A step as a script without any framework does it; by SGD unless told otherwise."""
    chosen = optimizer or torch.optim.SGD(module.parameters(), lr=1e-3)

    def step() -> None:
        chosen.zero_grad()
        functional.cross_entropy(module(x), y).backward()  # type: ignore[no-untyped-call]
        chosen.step()

    return step


def digits() -> tuple[torch.Tensor, torch.Tensor, str]:
    """The digits of scikit-learn, or numbers of that shape, and which of the two."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(1797, 1, 8, 8, generator=generator)
        labels = (images.flatten(1) @ torch.randn(64, 10, generator=generator)).argmax(1)
        return images, labels, "made up (scikit-learn is not installed: pip install scikit-learn)"
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(found.target), "digits of scikit-learn"
