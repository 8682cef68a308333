"""What a member is about to do, in a form that members can compare.

Every operation of a group has a number; all members must give the same number the same signature. It travels with the
data (in the slot's header, in the stream's opening frame), so that a difference is an error that names both sides
before any wrong byte is used.
"""

from __future__ import annotations

import struct

import msgspec

from paceline.wire import decoding
from paceline.wire.frame import UNREADABLE

_LENGTH = struct.Struct("<I")
# What a group does of its own accord, when it forms: no script calls these.
AGREE, SHOW, PROBE = "agree", "show", "probe"
_OWN = frozenset({AGREE, SHOW, PROBE})
_AUTO = "auto="


class Signature(msgspec.Struct, frozen=True, array_like=True):
    """`sizes` are the elements of each rank where those may differ; `root` is -1 where there is none."""

    operation: str
    reduction: str
    dtype: str
    shape: tuple[int, ...]
    root: int = -1
    algorithm: str = ""
    sizes: tuple[int, ...] = ()

    def __str__(self) -> str:
        parts = [
            part for part in (self.reduction, f"root={self.root}" if self.root >= 0 else "", self.algorithm) if part
        ]
        tensor = f"{self.dtype}{list(self.shape)}" if self.dtype else ""
        if self.sizes:
            parts.append(f"sizes={list(self.sizes)}")
        inside = ", ".join(([tensor] if tensor else []) + parts)
        return f"{self.operation}({inside})"


def chosen(algorithm: str) -> str:
    """How a signature names an algorithm that `auto` chose: members that chose differently differ."""
    return _AUTO + algorithm


def is_own_fault(one: Signature, other: Signature) -> bool:
    """Whether a difference is the group's own doing, which nothing in a script could bring about: what is called when a
    group forms, or only what `auto` chose."""
    if one.operation in _OWN or other.operation in _OWN:
        return True
    both_chose = one.algorithm.startswith(_AUTO) and other.algorithm.startswith(_AUTO)
    return both_chose and one != other and msgspec.structs.replace(one, algorithm=other.algorithm) == other


class Numbered(msgspec.Struct, frozen=True, array_like=True):
    """The opening of a stream, and what a waiting member tells the others."""

    number: int
    signature: Signature


def encode(signature: Signature) -> bytes:
    """The signature with its length before it, so that it can be read out of longer memory."""
    data = msgspec.msgpack.encode(signature)
    return _LENGTH.pack(len(data)) + data


def decode(data: bytes | memoryview) -> Signature | None:
    """None for bytes that are no signature."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        return decoding.decode(data[_LENGTH.size : _LENGTH.size + length], Signature)
    except (*UNREADABLE, struct.error):
        return None
