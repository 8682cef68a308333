"""The element types that cross the wire: their names there and their sizes."""

from __future__ import annotations

from typing import Any

import torch

NAMES: dict[torch.dtype, str] = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.bool: "bool",
    torch.complex64: "complex64",
    torch.complex128: "complex128",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in NAMES.items()}
SIZES: dict[str, int] = {name: dtype.itemsize for name, dtype in DTYPES.items()}


def name_of(dtype: torch.dtype) -> str:
    try:
        return NAMES[dtype]
    except KeyError:
        known = ", ".join(sorted(DTYPES))
        raise TypeError(f"tensors of {dtype} cannot be sent; convert to one of: {known}") from None


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
