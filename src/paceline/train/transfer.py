"""Training state from one member to another, through a group that both are in.

    donor       -> receiver    length of the description
    donor       -> receiver    the description: a tree's document, and each tensor's type, shape and checksum
    donor       -> receiver    the tensors, one after the other, straight from where they lie

The receiver takes new memory for everything and checks every checksum: nothing that it had is touched before all of it
is there and intact.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import msgspec
import torch

from paceline.checkpoint import tree
from paceline.collective import Group
from paceline.errors import ProtocolError
from paceline.fault_points import FaultPoint
from paceline.train.staging import Staging
from paceline.wire.dtypes import DTYPES, name_of, raw_bytes

_TAG = 1
SENDING: FaultPoint[[int], None] = FaultPoint("a donor has described its state to this rank, and sends the tensors")
MAX_DESCRIPTION_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 15
_SMALL_BYTES = 1 << 16  # tensors up to this size travel together


class _Part(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: int


class _Description(msgspec.Struct, frozen=True):
    document: msgspec.Raw
    parts: tuple[_Part, ...]


class StateParcel(NamedTuple):
    document: Any
    tensors: dict[str, torch.Tensor]


def pack(value: Any, *, copies: bool = False) -> StateParcel:
    """A tree of state, ready to be sent; `TypeError`, naming the place, for what cannot be. Its tensors stay where they
    lie unless it `copies` them."""
    document, tensors = tree.flatten(value)
    if copies:
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return StateParcel(document, tensors)


def send(group: Group, rank: int, parcel: StateParcel) -> None:
    """Send state; its tensors must not change before this returns."""
    document, tensors = parcel
    flat = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    parts = tuple(
        _Part(name, name_of(tensor.dtype), tuple(tensor.shape), _checksum(tensor)) for name, tensor in flat.items()
    )
    text = msgspec.json.encode(_Description(msgspec.Raw(msgspec.json.encode(document)), parts))
    description = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    group.send(torch.tensor([len(text)]), rank, tag=_TAG)
    group.send(description, rank, tag=_TAG)
    SENDING.reach(rank)
    small = [tensor for tensor in flat.values() if 0 < tensor.nbytes <= _SMALL_BYTES]
    if small:
        group.send(torch.cat([_as_bytes(tensor) for tensor in small]), rank, tag=_TAG)
    for tensor in flat.values():
        if tensor.nbytes > _SMALL_BYTES:
            group.send(_as_bytes(tensor), rank, tag=_TAG)


def receive(group: Group, rank: int, staging: Staging) -> Any:
    """The tree that a member sends, in memory of its own. `ProtocolError` if it is not intact."""
    length = torch.zeros(1, dtype=torch.int64)
    group.recv(length, rank, tag=_TAG)
    num_bytes = int(length)
    if not 0 < num_bytes <= MAX_DESCRIPTION_BYTES:
        raise ProtocolError(f"a description of {num_bytes} bytes from rank {rank}")
    text = torch.empty(num_bytes, dtype=torch.uint8)
    group.recv(text, rank, tag=_TAG)
    try:
        described = msgspec.json.decode(bytes(raw_bytes(text)), type=_Description)
        form = [(DTYPES[part.dtype], part.shape) for part in described.parts]
        flat = dict(zip([part.name for part in described.parts], staging.take(form), strict=True))
        document = msgspec.json.decode(described.document)
    except (msgspec.DecodeError, KeyError, ValueError, RuntimeError, OSError) as error:
        raise ProtocolError(f"a description from rank {rank} that cannot be read: {error}") from error
    small = [tensor for tensor in flat.values() if 0 < tensor.nbytes <= _SMALL_BYTES]
    if small:
        together = torch.empty(sum(tensor.nbytes for tensor in small), dtype=torch.uint8)
        group.recv(together, rank, tag=_TAG)
        at = 0
        for tensor in small:
            _as_bytes(tensor).copy_(together[at : at + tensor.nbytes])
            at += tensor.nbytes
    for tensor in flat.values():
        if tensor.nbytes > _SMALL_BYTES:
            group.recv(_as_bytes(tensor), rank, tag=_TAG)
    for part in described.parts:
        if _checksum(flat[part.name]) != part.checksum:
            raise ProtocolError(f"{part.name} from rank {rank} arrived damaged")
    return tree.unflatten(document, flat)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    """At the speed of memory, which a CRC of all bytes is not: the sum of each block, and a CRC of the sums, so that
    blocks that changed places are seen too."""
    flat = _as_bytes(tensor)
    num_whole = flat.numel() // _BLOCK_BYTES * _BLOCK_BYTES if flat.data_ptr() % 8 == 0 else 0
    found = 0
    if num_whole:
        sums = flat[:num_whole].view(torch.int64).view(-1, _BLOCK_BYTES // 8).sum(dim=1)
        found = zlib.crc32(raw_bytes(sums))
    return zlib.crc32(raw_bytes(flat[num_whole:]), found)
