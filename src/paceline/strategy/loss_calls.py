"""How the loss function is called: arguments, weights, micro-batches, random numbers.

A batch that is a tuple or list is spread over the arguments, `loss_fn(x, y)`. Anything else (a dict, a tensor, an
object) is the one argument, `loss_fn(batch)`.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch

from paceline.strategy.base import LossFn
from paceline.watch import spans


class Piece(NamedTuple):
    """What the loss function said of one micro-batch: its mean loss, and the weight of that in larger means."""

    loss: torch.Tensor
    weight: float
    explicit: bool


def spread(function: Callable[..., Any], batch: Any, name: str = "loss_fn") -> Any:
    """Call a function of the script with a batch; `name` is what the documents call such a function."""
    values = batch if isinstance(batch, tuple | list) else (batch,)
    try:
        return function(*values)
    except TypeError as error:
        if _takes(function, values):
            raise  # not the call itself: something in the function
        raise TypeError(f"{error}; {_wanted(batch, name)}") from None


def _takes(function: Callable[..., Any], values: Sequence[Any]) -> bool:
    """Whether it can be called with these; True if nobody can tell."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return True
    try:
        signature.bind(*values)
    except TypeError:
        return False
    return True


def _wanted(batch: Any, name: str) -> str:
    """How a function must look that takes such a batch."""
    if isinstance(batch, tuple | list):
        num = len(batch)
        names = ", ".join({1: ["x"], 2: ["x", "y"]}.get(num, [f"x{number}" for number in range(num)]))
        plural = "s" if num != 1 else ""
        return f"a batch of {num} value{plural} is passed as {num} argument{plural}: write def {name}({names})"
    return f"a batch that is a {type(batch).__name__} is passed as one argument: write def {name}(batch)"


def call(loss_fn: LossFn, batch: Any, samples: int) -> Piece:
    before = spans.mark("forward")
    result = spread(loss_fn, batch)
    spans.mark(before)
    explicit = isinstance(result, tuple)
    if not explicit:
        return Piece(_checked_loss(result), float(samples), False)
    if len(result) != 2:
        raise ValueError(f"loss_fn returned {len(result)} values; return the mean loss, or (mean loss, weight)")
    weight = float(result[1])
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(f"loss_fn returned the weight {weight}; it must be a finite number, not below 0")
    return Piece(_checked_loss(result[0]), weight, True)


def _checked_loss(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"loss_fn returned {type(loss).__name__}; return the mean loss as a tensor, or (mean loss, weight)"
        )
    if loss.numel() != 1:
        raise ValueError(f"loss_fn returned a tensor of shape {tuple(loss.shape)}; return the mean over its samples")
    if not loss.requires_grad:
        raise ValueError(
            "loss_fn returned a loss that depends on no trainable parameter; do not detach it or compute it in no_grad"
        )
    return loss


def piece_sizes(samples: int, most: int | None, fewest: int = 1) -> list[int]:
    """Into how many pieces a batch is cut, of `most` samples each; the last one has what is left, together with the one
    before it if that would be fewer than `fewest`."""
    if most is None or samples <= most:
        return [samples] if samples else []
    sizes = [most] * (samples // most)
    if rest := samples % most:
        sizes = [*sizes, rest] if rest >= fewest else [*sizes[:-1], sizes[-1] + rest]
    return sizes


def pieces(batch: Any, sizes: Sequence[int]) -> Iterator[tuple[Any, int]]:
    """The batch in pieces of these sizes, which sum to its samples."""
    if len(sizes) == 1:
        yield batch, sizes[0]
        return
    low, samples = 0, sum(sizes)
    for size in sizes:
        yield _cut(batch, low, low + size, samples, "batch"), size
        low += size


def _cut(part: Any, low: int, high: int, samples: int, where: str) -> Any:
    if isinstance(part, torch.Tensor | numpy.ndarray):
        if part.ndim == 0 or len(part) != samples:
            raise ValueError(
                f"{where} has shape {tuple(part.shape)} and cannot be cut into micro-batches of {samples} samples; "
                "let its first dimension count samples, or use micro_batch=None"
            )
        return part[low:high]
    if isinstance(part, Mapping):
        parts = {key: _cut(value, low, high, samples, f"{where}[{key!r}]") for key, value in part.items()}
        if type(part) is dict or not isinstance(part, MutableMapping):
            return parts
        made = copy.copy(part)  # of its own kind, as those of tokenizers are
        made.update(parts)
        return made
    if isinstance(part, tuple | list):
        if len(part) == samples and not any(isinstance(value, _CUTTABLE) for value in part):
            return part[low:high]  # one plain value a sample, as strings are collated
        cut = [_cut(value, low, high, samples, f"{where}[{number}]") for number, value in enumerate(part)]
        if isinstance(part, tuple):
            return type(part)(*cut) if hasattr(part, "_fields") else tuple(cut)
        return cut
    if part is None:
        return None
    raise TypeError(
        f"{where} is {type(part).__name__}, which cannot be cut into micro-batches; use tensors in tuples, lists and "
        "dicts, or micro_batch=None"
    )


_CUTTABLE = (torch.Tensor, numpy.ndarray, Mapping, tuple, list)


@contextlib.contextmanager
def seeded(seed: int, step: int, rank: int) -> Iterator[None]:
    """Torch's random numbers depend on these three in here, and outside it is as if nothing had been drawn."""
    generator = torch.default_generator
    outer = generator.get_state()
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)
    try:
        yield
    finally:
        generator.set_state(outer)
