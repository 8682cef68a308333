"""A first, discarded call of the loss: it compiles, allocates and finds mistakes before anybody waits for this worker.

A worker that joins reports ready when its script asks for the first epoch. What the first step costs beyond a usual one
(compilation, memory, kernels that are chosen, lazy imports) is paid by all others if it comes after that.

Where the agent asks for it (`--capacity probe`), the loss is then called for about a second more, on more and more
samples: how long that takes gives the worker a first share that fits, beside workers that were measured.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from paceline.data.dataset import check_dataset
from paceline.data.loader import Loader, LoaderOptions
from paceline.data.seeding import generators_kept
from paceline.data.window import BatchSpec
from paceline.engine.speeds import PROBE_VARIABLE
from paceline.strategy import loss_calls, memory
from paceline.train.frames import boundary

_MOST_PROBED = 1024
_REPEATED = 3

_tried: list[tuple[float, float]] = []


@boundary
def warm_up(
    model: nn.Module, loss_fn: Callable[..., Any], data: Any, options: LoaderOptions | None = None, *, samples: int = 2
) -> None:
    """Call `loss_fn`, forward and backward, on the first samples of the data, before the Session is made: what is slow
    the first time (compiling, allocating) is then done before other workers wait for this one.

    >>> paceline.warm_up(model, loss_fn, data)
    >>> session = paceline.Session(model, optimizer, data=data, global_batch=256)

    Afterwards gradients, buffers and the global random generators are as before, and nothing has been counted. Whatever
    `loss_fn` raises is raised here."""
    if type(samples) is not int or samples < 1:
        raise ValueError(f"warm_up(samples={samples!r}): give 1 sample or more")
    num_samples = min(samples, check_dataset(data))
    collate_fn = options.collate_fn if options is not None else None
    probe_s = float(os.environ.get(PROBE_VARIABLE) or 0)
    loader = Loader(data, seed=0, options=LoaderOptions(collate_fn=collate_fn))

    def take(count: int) -> None:
        batch = loader.fetch(BatchSpec((0, 0), 0, tuple(range(count))), lambda _: None)
        loss_calls.call(loss_fn, batch, count).loss.backward()  # type: ignore[no-untyped-call]
        _synchronize()

    with loader, generators_kept(), _untouched(model), torch.enable_grad(), _accelerators_kept():
        take(num_samples)
        if probe_s > 0:
            _tried[:] = [_probe(take, num_samples, min(len(data), _MOST_PROBED), probe_s)]


def tried_pace() -> tuple[float, float] | None:
    """The fixed time of a step and that of a sample, as this process found by trying; None if it did not."""
    return _tried[0] if _tried else None


def _probe(take: Callable[[int], None], fewest: int, most: int, probe_s: float) -> tuple[float, float]:
    """The line through the two largest batches for which there was time."""
    ends_at = time.monotonic() + probe_s
    count = fewest
    times: dict[int, float] = {}
    while not times or (time.monotonic() < ends_at and count <= most):
        try:
            times[count] = min(_timed(take, count) for _ in range(_REPEATED))
        except Exception as error:
            if not times or not memory.is_exhausted(error):
                raise
            memory.release(error)
            break
        count *= 2
    largest = max(times)
    sample_s = times[largest] / largest
    if len(times) > 1:
        sample_s = max(sample_s / 10, (times[largest] - times[largest // 2]) / (largest - largest // 2))
    return max(0.0, times[largest] - sample_s * largest), sample_s


def _timed(take: Callable[[int], None], count: int) -> float:
    began = time.monotonic()
    take(count)
    return time.monotonic() - began


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


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
