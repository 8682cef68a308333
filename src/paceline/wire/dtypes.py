"""Tensors as the wire sees them: the names of their types there, and their raw bytes."""

from __future__ import annotations

from typing import Any

import torch

from paceline.wire.frame import SIZES, TensorSpec

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in SIZES}
NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    try:
        return NAMES[dtype]
    except KeyError:
        known = ", ".join(sorted(DTYPES))
        raise TypeError(f"tensors of {dtype} cannot be sent; convert to one of: {known}") from None


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name_of(tensor.dtype), tuple(tensor.shape))


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as memory that sockets can read from and write into."""
    if tensor.numel() == 0:
        return memoryview(b"")
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise TypeError("only contiguous CPU tensors have raw bytes")
    flat = tensor.detach().view(-1)
    if flat.is_conj() or flat.is_neg():
        raise TypeError("a lazily conjugated or negated tensor has no raw bytes yet; call resolve_conj().resolve_neg()")
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)
