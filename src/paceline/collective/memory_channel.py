"""Large messages within a host: through the sender's shared memory. The connection carries only signals, a byte each.

    sender   -> receiver   "carried": the tag, the tensor's type and shape, where to find it

    in place   the tensor lies in the sender's arena: the receiver copies it from there, and signals
    by belt    bins in the sender's arena: the sender fills bin k mod NUM_BINS when k - NUM_BINS was emptied, and
               signals; the receiver copies it out, and signals

The sender goes on when the last signal has come, so no signal is left over for the next message.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch

from paceline.errors import OutOfSharedMemory, ProtocolError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import spec_of
from paceline.wire.frame import TensorSpec
from paceline.wire.memory import Arena, SharedMemory

KIND = "carried"
LARGE_BYTES = 1 << 18
BIN_BYTES = 1 << 20
NUM_BINS = 4
_SIGNAL = memoryview(b"\1")


class ChannelMessage(msgspec.Struct, frozen=True, array_like=True):
    tag: int
    spec: TensorSpec
    offset: int
    in_place: bool


class MemoryChannel:
    """`memories` are those of the other members of this host, by rank. Each rank's belt is used by one thread at a
    time."""

    def __init__(self, arena: Arena, memories: Mapping[int, SharedMemory]) -> None:
        self._arena = arena
        self._memories = memories
        self._belts: dict[int, torch.Tensor] = {}

    def send(self, connection: Connection, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> bool:
        """False, and nothing was sent, if the tensor is small, the other on another host, or memory short."""
        if tensor.nbytes < LARGE_BYTES or rank not in self._memories:
            return False
        offset = self._arena.offset_of(tensor)
        belt = None
        if offset < 0:
            belt = self._belt(rank)
            if belt is None:
                return False
            offset = self._arena.offset_of(belt)
        connection.send(KIND, ChannelMessage(tag, spec_of(tensor), offset, belt is None), deadline=deadline)
        if belt is None:
            _wait_for_signal(connection, deadline)
        else:
            _fill(connection, belt, _as_bytes(tensor), deadline)
        return True

    def receive(
        self, connection: Connection, carried: ChannelMessage, tensor: torch.Tensor, rank: int, deadline: Deadline
    ) -> None:
        """Into a tensor of the type and shape that was announced, and checked."""
        memory = self._memories.get(rank)
        needed = carried.spec.num_bytes() if carried.in_place else NUM_BINS * BIN_BYTES
        if memory is None or not 0 <= carried.offset <= memory.num_bytes - needed:
            raise ProtocolError(f"{connection.peer} says that a message lies where it has no memory")
        source = memory.tensor(carried.offset, needed, torch.uint8)
        if carried.in_place:
            _as_bytes(tensor).copy_(source)
            connection.send_all([_SIGNAL], deadline)
        else:
            _empty(connection, source, _as_bytes(tensor), deadline)

    def _belt(self, rank: int) -> torch.Tensor | None:
        if rank not in self._belts:
            try:
                self._belts[rank] = self._arena.empty((NUM_BINS * BIN_BYTES,), torch.uint8)
            except OutOfSharedMemory:
                return None
        return self._belts[rank]

    def close(self) -> None:
        self._belts.clear()


def _fill(connection: Connection, belt: torch.Tensor, data: torch.Tensor, deadline: Deadline) -> None:
    num_parts = -(-data.numel() // BIN_BYTES)
    for number in range(num_parts):
        if number >= NUM_BINS:
            _wait_for_signal(connection, deadline)
        part = data[number * BIN_BYTES : (number + 1) * BIN_BYTES]
        _bin(belt, number)[: part.numel()].copy_(part)
        connection.send_all([_SIGNAL], deadline)
    for _ in range(min(num_parts, NUM_BINS)):
        _wait_for_signal(connection, deadline)


def _empty(connection: Connection, belt: torch.Tensor, data: torch.Tensor, deadline: Deadline) -> None:
    for number in range(-(-data.numel() // BIN_BYTES)):
        _wait_for_signal(connection, deadline)
        part = data[number * BIN_BYTES : (number + 1) * BIN_BYTES]
        part.copy_(_bin(belt, number)[: part.numel()])
        connection.send_all([_SIGNAL], deadline)


def _bin(belt: torch.Tensor, number: int) -> torch.Tensor:
    at = number % NUM_BINS * BIN_BYTES
    return belt[at : at + BIN_BYTES]


def _wait_for_signal(connection: Connection, deadline: Deadline) -> None:
    connection.receive_all(memoryview(bytearray(1)), deadline)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(-1).view(torch.uint8)
