"""When a worker runs out of memory: how that is known, and what is given back before it tries again."""

from __future__ import annotations

import gc

import torch

_SAID = ("can't allocate memory", "not enough memory", "out of memory")


def is_exhausted(error: BaseException) -> bool:
    """Whether an exception means that there was not enough memory, of whatever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    # The allocator of the CPU has no type of its own.
    return type(error) is RuntimeError and any(words in str(error) for words in _SAID)


def release(error: BaseException) -> None:
    """Let go of what the failed attempt held: its traceback keeps every frame, and with them the activations."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        current.__traceback__ = None
        current = current.__cause__ or current.__context__
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
