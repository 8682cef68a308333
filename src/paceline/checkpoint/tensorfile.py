"""Named tensors in a file of the safetensors format, with a checksum taken on the way.

The format is 8 bytes of header length, a JSON header, and the tensors' bytes without gaps. It is written here and not
by the safetensors library because a checkpoint is written beside training: piece by piece without the interpreter's
lock, hashed in the same pass, ended between two pieces when it is no longer wanted, with the system's own error when
the disk is full. Any safetensors reader reads it.

Two things that the format cannot say are in the header's metadata: names that stand for another tensor
(`paceline.aliases`), and complex tensors that are kept as pairs in a last dimension of 2 (`paceline.pairs`).

Invariants of reading: nothing is allocated that the file does not have the bytes for, every byte of the file belongs to
exactly one tensor or to the header, and each tensor has its own memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from paceline.errors import CorruptCheckpoint
from paceline.wire.dtypes import raw_bytes

RESERVED = "__metadata__"
PIECE_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts
_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PAIRS = {torch.complex128: torch.float64, torch.complex32: torch.float16}


def why_not(tensor: torch.Tensor) -> str:
    """Why this tensor cannot be saved and what to do; empty if it can."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"a tensor of the class {type(tensor).__qualname__} cannot be saved; save a plain tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor of the layout {tensor.layout} cannot be saved; save to_dense() of it, or its parts"
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no values to save; materialize it first"
    if tensor.dtype not in _NAMES and tensor.dtype not in _PAIRS:
        return f"a tensor of {tensor.dtype} cannot be saved; convert it, or save view(torch.uint8) of it"
    return ""


class FileLayout(NamedTuple):
    """A file that can be written: its header, and its tensors in the order of their bytes."""

    header: bytes
    tensors: list[torch.Tensor]
    num_bytes: int


def lay_out(tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str]) -> FileLayout:
    metadata = {"format": "pt"}
    if aliases:
        metadata["paceline.aliases"] = json.dumps(dict(aliases))
    pairs = sorted(name for name, tensor in tensors.items() if tensor.dtype in _PAIRS)
    if pairs:
        metadata["paceline.pairs"] = json.dumps(pairs)
    # The widest first, so that every tensor is aligned for who maps the file.
    order = sorted(tensors, key=lambda name: (-_stored(tensors[name])[0].itemsize, name))
    entries: dict[str, Any] = {RESERVED: metadata}
    end = 0
    for name in order:
        dtype, shape = _stored(tensors[name])
        begin, end = end, end + tensors[name].numel() * tensors[name].dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FileLayout(header, [tensors[name] for name in order], len(header) + end)


def _stored(tensor: torch.Tensor) -> tuple[torch.dtype, list[int]]:
    half = _PAIRS.get(tensor.dtype)
    return (tensor.dtype, list(tensor.shape)) if half is None else (half, [*tensor.shape, 2])


def write(fd: int, layout: FileLayout, between: Callable[[], None]) -> str:
    """Write the file and return its SHA-256. `between` is called between pieces; what it raises ends the writing."""
    checksum = hashlib.sha256()
    for whole in pieces(layout):
        between()
        checksum.update(whole)
        piece = whole
        while len(piece):
            piece = piece[os.write(fd, piece) :]
    return checksum.hexdigest()


def pieces(layout: FileLayout) -> Iterator[memoryview]:
    """All bytes of the file, in order."""
    for part in (memoryview(layout.header), *map(_bytes_of, layout.tensors)):
        for begin in range(0, len(part), PIECE_BYTES):
            yield part[begin : begin + PIECE_BYTES]


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    # Nothing is copied of what already lies as it is written.
    return raw_bytes(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous())


# -- reading ---------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int
    end: int


def read(fd: int, *, checksum: bool) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a file, and its SHA-256 (empty if not asked for)."""
    hasher = hashlib.sha256() if checksum else None
    num_bytes = os.fstat(fd).st_size
    prefix = bytearray(8)
    _fill(fd, memoryview(prefix), hasher)
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > min(_MAX_HEADER_BYTES, num_bytes - 8):
        raise CorruptCheckpoint(f"a header of {header_bytes:,} bytes in a file of {num_bytes:,}")
    header = bytearray(header_bytes)
    _fill(fd, memoryview(header), hasher)
    entries, pairs = _parse(bytes(header), num_bytes - 8 - header_bytes)
    found = {}
    for entry in entries:
        try:
            tensor = torch.empty(entry.shape, dtype=entry.dtype)
        except RuntimeError as error:  # how torch says that there is no memory, or no such shape
            raise CorruptCheckpoint(f"no tensor {entry.name!r} of shape {entry.shape} can be made: {error}") from error
        _fill(fd, raw_bytes(tensor), hasher)
        found[entry.name] = torch.view_as_complex(tensor) if entry.name in pairs else tensor
    return found, hasher.hexdigest() if hasher else ""


def _fill(fd: int, into: memoryview, hasher: Any) -> None:
    for begin in range(0, len(into), PIECE_BYTES):
        piece = into[begin : begin + PIECE_BYTES]
        left = piece
        while len(left):
            count = os.readv(fd, [left])
            if count == 0:
                raise CorruptCheckpoint(f"the file ends {len(into) - begin - len(piece) + len(left):,} bytes too early")
            left = left[count:]
        if hasher is not None:
            hasher.update(piece)


def _parse(header: bytes, data_bytes: int) -> tuple[list[_Entry], set[str]]:
    try:
        read = json.loads(header)
        metadata = read.pop(RESERVED, {})
        pairs = set(json.loads(metadata.get("paceline.pairs", "[]")))
        entries = sorted((_entry(name, body) for name, body in read.items()), key=lambda entry: entry[3:])
        for entry in entries:
            if entry.name in pairs and (entry.dtype not in _PAIRS.values() or entry.shape[-1:] != [2]):
                raise ValueError(f"{entry.name!r} is called a complex tensor and is none")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptCheckpoint(f"a header that cannot be read: {error}") from error
    end = 0
    for entry in entries:
        if entry.begin != end:
            raise CorruptCheckpoint(f"the tensor {entry.name!r} begins at byte {entry.begin}, not at {end}")
        end = entry.end
    if end != data_bytes:
        raise CorruptCheckpoint(f"tensors of {end:,} bytes in a file that has {data_bytes:,} for them")
    return entries, pairs


def _entry(name: str, body: Any) -> _Entry:
    dtype, shape, (begin, end) = _DTYPES[body["dtype"]], body["shape"], body["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, begin, end)):
        raise ValueError(f"{name!r} has a shape or an offset that is none")
    if len(shape) > 64 or math.prod(shape) * dtype.itemsize != end - begin:
        raise ValueError(f"{name!r} has {end - begin} bytes, which do not fit its shape")
    return _Entry(name, dtype, list(shape), begin, end)
