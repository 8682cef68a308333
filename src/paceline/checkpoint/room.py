"""Memory for many tensors at once: one area, in huge pages where the kernel has them, cut into pieces.

Fresh memory costs a fault for every page when it is first touched; for a state in small pages that takes several times
as long as the copying itself.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence

import torch

_ALIGNMENT = 64
_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

Form = Sequence[tuple[torch.dtype, Sequence[int]]]


def fresh_area(num_bytes: int) -> mmap.mmap:
    """`OSError` if there is no memory. It lives as long as a tensor that was cut from it."""
    area = mmap.mmap(-1, num_bytes, flags=_FLAGS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        area.madvise(mmap.MADV_HUGEPAGE)
    return area


def bytes_for(form: Form) -> int:
    """How large an area must be for tensors of these types and shapes."""
    return sum(_aligned(size) for size in _sizes(form))


def cut(memory: torch.Tensor, form: Form) -> list[torch.Tensor]:
    """Tensors of these types and shapes, side by side in an area's bytes."""
    tensors = []
    begin = 0
    for (dtype, shape), size in zip(form, _sizes(form), strict=True):
        tensors.append(memory[begin : begin + size].view(dtype).view(tuple(shape)))
        begin += _aligned(size)
    return tensors


def _sizes(form: Form) -> list[int]:
    return [torch.Size(shape).numel() * dtype.itemsize for dtype, shape in form]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
