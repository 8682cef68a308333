"""What a frame is: pure functions between values and bytes; no socket here.

    prefix   16 bytes: magic "PLN1", length of the header (u32), length of the payload (u64), little endian
    header   msgspec: kind, body, and the type and shape of each tensor
    payload  the raw bytes of the tensors, one after the other, nothing between them

A reader gets the prefix first, checks it against its `Limits`, and only then takes memory for the header; it checks
the header before it takes memory for tensors. Every byte string either parses or raises `ProtocolError`.

A *stream* is a frame without tensors whose payload length is that of the bytes that follow: both sides derive the
layout of those bytes from the header (a collective does), and read them straight to where they belong.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from paceline.errors import ProtocolError
from paceline.wire.decoding import decode

MAGIC = b"PLN1"
PREFIX = struct.Struct("<4sIQ")
# The element types that cross the wire. What torch calls them is in `dtypes`: a process that moves no tensors is spared
# the import of torch.
SIZES = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
MAX_DIMENSIONS = 64
MAX_EXTENT = 1 << 48  # torch overflows on strides beyond, even where another extent is 0
# What msgspec raises for bytes that it cannot decode; text that is not UTF-8 is no DecodeError to it.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Body = TypeVar("Body")


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader accepts; checked before memory is taken."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 1 << 36
    num_tensors: int = 4096


HANDSHAKE_LIMITS = Limits(header_bytes=4096, payload_bytes=0, num_tensors=0)


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    dtype: str
    shape: tuple[int, ...]

    def num_bytes(self) -> int:
        return math.prod(self.shape) * SIZES[self.dtype]


class Header(msgspec.Struct, frozen=True, array_like=True):
    """`kind` says what the frame is for, `body` is a message of that kind, still encoded."""

    kind: str
    body: msgspec.Raw
    tensors: tuple[TensorSpec, ...] = ()

    def read_body(self, body_type: type[Body]) -> Body:
        try:
            return decode(self.body, body_type)
        except UNREADABLE as error:
            raise ProtocolError(
                f"a frame of kind {self.kind!r} has a body that is not a {body_type.__name__}: {error}"
            ) from error


_header_decoder = msgspec.msgpack.Decoder(Header)


def encode(kind: str, body: Any, specs: Sequence[TensorSpec] = (), *, payload_bytes: int | None = None) -> bytes:
    """Prefix and header of a frame. `payload_bytes` is given for a stream, else the tensors say it."""
    header = msgspec.msgpack.encode(Header(kind, msgspec.Raw(msgspec.msgpack.encode(body)), tuple(specs)))
    if payload_bytes is None:
        payload_bytes = sum(spec.num_bytes() for spec in specs)
    return PREFIX.pack(MAGIC, len(header), payload_bytes) + header


def decode_prefix(prefix: bytes | bytearray | memoryview, limits: Limits) -> tuple[int, int]:
    """The lengths of header and payload."""
    if len(prefix) != PREFIX.size:
        raise ProtocolError(f"a prefix of {len(prefix)} bytes where {PREFIX.size} were expected")
    magic, header_bytes, payload_bytes = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ProtocolError(
            f"expected a frame, got bytes that start with {bytes(magic)!r}: not a Paceline peer, or another version"
        )
    if header_bytes > limits.header_bytes:
        raise ProtocolError(f"a header of {header_bytes} bytes is over the limit of {limits.header_bytes}")
    if payload_bytes > limits.payload_bytes:
        raise ProtocolError(f"a payload of {payload_bytes} bytes is over the limit of {limits.payload_bytes}")
    return header_bytes, payload_bytes


def decode_header(header: bytes | bytearray | memoryview, payload_bytes: int, limits: Limits) -> Header:
    """The header, with its tensors checked against the limits and the payload's length."""
    try:
        decoded = _header_decoder.decode(header)
    except UNREADABLE as error:
        raise ProtocolError(f"a header that cannot be read: {error}") from error
    if len(decoded.tensors) > limits.num_tensors:
        raise ProtocolError(f"{len(decoded.tensors)} tensors in one frame are over the limit of {limits.num_tensors}")
    for spec in decoded.tensors:
        check_spec(spec)
    if decoded.tensors and sum(spec.num_bytes() for spec in decoded.tensors) != payload_bytes:
        raise ProtocolError(
            f"the tensors of a {decoded.kind!r} frame do not add up to its payload of {payload_bytes} bytes"
        )
    return decoded


def check_spec(spec: TensorSpec) -> None:
    """`ProtocolError` for what cannot be a tensor; before memory is taken for it."""
    if spec.dtype not in SIZES:
        raise ProtocolError(f"a tensor of unknown type {spec.dtype!r}")
    if len(spec.shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"a tensor of {len(spec.shape)} dimensions is over the limit of {MAX_DIMENSIONS}")
    if min(spec.shape, default=0) < 0 or math.prod(extent or 1 for extent in spec.shape) > MAX_EXTENT:
        raise ProtocolError(f"a tensor with impossible shape {spec.shape}")
