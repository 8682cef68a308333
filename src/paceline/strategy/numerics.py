"""Whether gradients are finite, and how large they are.

Each rank examines only its slice of the reduced gradients and the ranks add up in the header, so the result has the
same bits on all. One pass over the slice tells both: a sum of squares, or a plain sum, is not finite if any element is
not. It may also not be finite because it overflowed; then a slow and exact look decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

# A dot product of this many float32 elements is exact to some 1e-7, and stays in the cache.
_CHUNK = 1 << 16
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class Examined:
    """What was seen of one rank's slices."""

    def __init__(self, *, wants_norm: bool) -> None:
        self.finite = True
        self.squares = 0.0
        self._wants_norm = wants_norm

    def look(self, flat: torch.Tensor) -> None:
        """Examine a flat contiguous tensor."""
        if flat.is_complex():
            flat = torch.view_as_real(flat).view(-1)
        if self._wants_norm:
            self.squares += _squares(flat)
            total = self.squares
        else:
            total = float(flat.sum(dtype=_accumulator(flat.dtype)))
        if not math.isfinite(total) and self.finite:
            self.finite = is_finite(flat)
            if self.finite and self._wants_norm:
                self.squares = float("inf")  # finite elements, but too large for a norm: clips to zero, as torch does

    def look_at_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """Examine tensors of any shape. Where many are small, most of the time goes into asking, so one question is
        asked for all: a sum of sums is not finite if any element is not."""
        if not self._wants_norm and all(tensor.dtype == torch.float32 for tensor in tensors):
            total = float(torch.stack([tensor.sum() for tensor in tensors]).sum()) if tensors else 0.0
            if math.isfinite(total):
                return
        for tensor in tensors:
            self.look(tensor.reshape(-1))

    def look_finite(self, flat: torch.Tensor) -> None:
        """The same, of what counts in the norm elsewhere."""
        if self.finite and not math.isfinite(float(flat.sum(dtype=_accumulator(flat.dtype)))):
            self.finite = is_finite(flat)


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def clip_factor(norm: float, clip_norm: float) -> float:
    """What to multiply with so that the norm is at most `clip_norm`, as torch.nn.utils.clip_grad_norm_ does."""
    return min(1.0, clip_norm / (norm + _EPSILON))


def _squares(flat: torch.Tensor) -> float:
    accumulator = _accumulator(flat.dtype)
    total = 0.0
    for chunk in torch.split(flat, _CHUNK):
        wide = chunk if chunk.dtype == accumulator else chunk.to(accumulator)
        found = float(torch.dot(wide, wide))
        if not math.isfinite(found):  # float64 holds the square of any float32
            wide = chunk.to(torch.float64)
            found = float(torch.dot(wide, wide))
        total += found
    return total


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
