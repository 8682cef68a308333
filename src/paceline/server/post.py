"""Letters between two processes of the group: a message, and tensors that travel in the letter or stay where they lie.

On one host a tensor in shared memory is not sent: the letter says where it lies, and the other side, which got the
memory handed over once, reads it there, or writes there what it was asked for. So gradients and parameters cross no
socket. Between hosts the same letters carry the tensors.

    memory   -> a number for a memory whose descriptor follows; once for each memory and connection
    forget   -> the number of a memory that is gone: it was that of a process that is
    letter   -> the message; the tensors of which some are references; what is wanted, and where it is to be written

Contract: what a letter refers to must not change, and what it wants is not looked at, until it was answered. A
postbox is used by one thread at a time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import torch

from paceline.errors import ProtocolError
from paceline.server.messages import Message
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import Fd, creating
from paceline.wire.dtypes import DTYPES, spec_of
from paceline.wire.frame import Limits, TensorSpec, check_spec
from paceline.wire.handover import receive_descriptors, send_descriptors
from paceline.wire.memory import SharedMemory

ROOM = "server"  # where members of the run call at a server
LIMITS = Limits(header_bytes=1 << 26, num_tensors=1 << 16)


class Reference(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies: in which memory, and at which byte."""

    memory: int
    offset: int


class _Letter(msgspec.Struct, frozen=True, array_like=True):
    message: Message
    specs: tuple[TensorSpec, ...] = ()
    places: tuple[Reference | None, ...] = ()
    wanted: tuple[TensorSpec, ...] = ()
    wanted_places: tuple[Reference | None, ...] = ()


class Letter(NamedTuple):
    """What was received. `wanted` are tensors to be filled: in the sender's memory, or new ones to be sent back."""

    message: Message
    tensors: list[torch.Tensor]
    wanted: list[torch.Tensor]
    is_in_place: bool


class Memories:
    """The shared memories that this process can refer to: its own, and those that others handed over. Used by all
    threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, SharedMemory] = {}  # replaced and not changed: others may be looking
        self._next = 0

    def add(self, memory: SharedMemory) -> int:
        with self._lock:
            self._next += 1
            self._known = {**self._known, self._next: memory}
            return self._next

    def remove(self, number: int) -> None:
        with self._lock:
            known = dict(self._known)
            known.pop(number).close()
            self._known = known

    def lend(self, number: int) -> Fd | None:
        """A descriptor of a memory, for the caller to close; None if it is gone meanwhile."""
        with self._lock, creating:
            memory = self._known.get(number)
            return None if memory is None else Fd(os.dup(memory.descriptor.fileno()))

    def has(self, number: int) -> bool:
        return number in self._known

    def find(self, tensor: torch.Tensor) -> Reference | None:
        """Where a tensor lies, if in any of them."""
        address = tensor.data_ptr()
        for number, memory in self._known.items():
            offset = address - memory.address
            if 0 <= offset < memory.num_bytes:
                return Reference(number, offset)
        return None


class Postbox:
    """One end of a connection. `memories` are those of this process; what is handed over here is added to them."""

    def __init__(self, connection: Connection, memories: Memories) -> None:
        self.connection = connection
        self._memories = memories
        self._shown: set[int] = set()  # the numbers of memories that the other side has
        self._seen: dict[int, tuple[int, SharedMemory]] = {}  # those of the other side, by their number there

    def send(
        self,
        message: Message,
        tensors: Sequence[torch.Tensor] = (),
        wanted: Sequence[torch.Tensor] = (),
        *,
        deadline: Deadline,
    ) -> None:
        for number in [number for number in self._shown if not self._memories.has(number)]:
            self.connection.send("forget", number, deadline=deadline)
            self._shown.discard(number)
        places = tuple(self._place(tensor, deadline) for tensor in tensors)
        wanted_places = tuple(self._place(tensor, deadline) for tensor in wanted)
        specs, wanted_specs = tuple(map(spec_of, tensors)), tuple(map(spec_of, wanted))
        inside = [tensor.contiguous() for tensor, place in zip(tensors, places, strict=True) if place is None]
        letter = _Letter(message, specs, places, wanted_specs, wanted_places)
        self.connection.send("letter", letter, inside, deadline=deadline)

    def _place(self, tensor: torch.Tensor, deadline: Deadline) -> Reference | None:
        if not self.connection.is_local or not tensor.is_contiguous() or not tensor.numel():
            return None
        found = self._memories.find(tensor)
        if found is None:
            return None
        if found.memory not in self._shown:
            descriptor = self._memories.lend(found.memory)
            if descriptor is None:
                return None
            try:
                self.connection.send("memory", found.memory, deadline=deadline)
                send_descriptors(self.connection, [descriptor], deadline)
            finally:
                descriptor.close()
            self._shown.add(found.memory)
        return found

    def receive(self, *, deadline: Deadline) -> Letter:
        while True:
            header, payload_bytes = self.connection.receive_header(deadline=deadline, limits=LIMITS)
            if header.kind == "memory":
                self._take_memory(header.read_body(int), deadline)
                continue
            if header.kind == "forget":
                self._forget(header.read_body(int))
                continue
            letter = header.read_body(_Letter)
            if payload_bytes and not header.tensors:
                raise ProtocolError(f"{self.connection.peer} sent bytes that no tensor claims")
            inside = iter(self.connection.receive_tensors(header, deadline=deadline))
            if [spec for spec, place in _pairs(letter.specs, letter.places) if place is None] != list(header.tensors):
                raise ProtocolError(f"{self.connection.peer} sent other tensors than its letter says")
            tensors = [
                next(inside) if place is None else self._resolve(spec, place)
                for spec, place in _pairs(letter.specs, letter.places)
            ]
            wanted = [
                _new(spec) if place is None else self._resolve(spec, place)
                for spec, place in _pairs(letter.wanted, letter.wanted_places)
            ]
            is_in_place = bool(wanted) and all(place is not None for place in letter.wanted_places)
            return Letter(letter.message, tensors, wanted, is_in_place)

    def _take_memory(self, number: int, deadline: Deadline) -> None:
        (descriptor,) = receive_descriptors(self.connection, 1, deadline)
        memory = SharedMemory.attach(descriptor)
        self._seen[number] = (self._memories.add(memory), memory)

    def _forget(self, number: int) -> None:
        """Tensors there that are still in use keep the memory until they are gone."""
        if (found := self._seen.pop(number, None)) is not None:
            self._memories.remove(found[0])

    def _resolve(self, spec: TensorSpec, place: Reference) -> torch.Tensor:
        check_spec(spec)
        memory = self._seen.get(place.memory, (0, None))[1]
        if memory is None or not 0 <= place.offset <= memory.num_bytes - spec.num_bytes():
            raise ProtocolError(f"{self.connection.peer} refers to a tensor where it has no memory")
        dtype = DTYPES[spec.dtype]
        if place.offset % dtype.itemsize:
            raise ProtocolError(f"{self.connection.peer} refers to a tensor between two elements")
        flat = memory.tensor(place.offset, spec.num_bytes() // dtype.itemsize, dtype)
        return flat.view(spec.shape)

    def close(self) -> None:
        self.connection.close()
        for number in list(self._seen):
            self._forget(number)


def _pairs(
    specs: Iterable[TensorSpec], places: Iterable[Reference | None]
) -> list[tuple[TensorSpec, Reference | None]]:
    try:
        return list(zip(specs, places, strict=True))
    except ValueError as error:
        raise ProtocolError("a letter that does not say of all its tensors where they are") from error


def _new(spec: TensorSpec) -> torch.Tensor:
    check_spec(spec)
    return torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
