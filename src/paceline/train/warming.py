"""A first, discarded call of the loss: it compiles, allocates and finds mistakes before anybody waits for this worker.

A worker that joins reports ready when its script asks for the first epoch. What the first step costs beyond a usual one
(compilation, memory, kernels that are chosen, lazy imports) is paid by all others if it comes after that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.data.dataset import check_dataset
from paceline.data.loader import Loader, LoaderOptions
from paceline.data.seeding import generators_kept
from paceline.data.window import Work
from paceline.strategy import calling


def warm_up(
    model: nn.Module, loss_fn: Callable[..., Any], data: Any, options: LoaderOptions | None = None, *, samples: int = 2
) -> None:
    """Call `loss_fn`, forward and backward, on the first samples of the data. Call it before the Session is made.

    Afterwards gradients, buffers and the global random generators are as before, and nothing has been counted. Whatever
    `loss_fn` raises is raised here."""
    if type(samples) is not int or samples < 1:
        raise ValueError(f"warm_up(samples={samples!r}): give 1 sample or more")
    num_samples = min(samples, check_dataset(data))
    collate_fn = options.collate_fn if options is not None else None
    with generators_kept(), _untouched(model):
        with Loader(data, seed=0, options=LoaderOptions(collate_fn=collate_fn)) as loader:
            batch = loader.fetch(Work((0, 0), 0, tuple(range(num_samples))), lambda _: None)
        with torch.enable_grad(), _accelerators_kept():
            calling.call(loss_fn, batch, num_samples).loss.backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Gradients and buffers are afterwards what they were, also where the forward pass put others in their place."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [
        (module._buffers, name, buffer, buffer.detach().clone() if buffer is not None else None)
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for holder, name, buffer, copy in buffers:
                if buffer is not None and copy is not None:
                    buffer.copy_(copy)
                holder[name] = buffer


@contextlib.contextmanager
def _accelerators_kept() -> Iterator[None]:
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
