"""Letters: what travels in them, what stays where it lies, and what a bad one does."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from paceline.errors import ProtocolError
from paceline.server.messages import Acknowledged
from paceline.server.post import Memories, Postbox, Reference, _Letter
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import spec_of
from paceline.wire.frame import TensorSpec
from paceline.wire.memory import Arena, SharedMemory


def soon() -> Deadline:
    return Deadline(5.0, "a test of letters")


MESSAGE = Acknowledged(1)


class Ends(NamedTuple):
    ours: Postbox
    theirs: Postbox
    arena: Arena  # our memory
    mine: Memories
    known: Memories  # those of the other side

    def post(self, *tensors: torch.Tensor, wanted: tuple[torch.Tensor, ...] = ()) -> Any:
        self.ours.send(MESSAGE, tensors, wanted, deadline=soon())
        return self.theirs.receive(deadline=soon())


def pair(kind: str) -> tuple[socket.socket, socket.socket]:
    if kind == "unix":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialed = socket.create_connection(listener.getsockname())
        return dialed, listener.accept()[0]


@contextlib.contextmanager
def made(kind: str, mine: Memories | None = None) -> Iterator[Ends]:
    one, other = (Connection(sock, peer="the other") for sock in pair(kind))
    memory = SharedMemory.create(1 << 24)
    mine, known = mine or Memories(), Memories()
    mine.add(memory)
    found = Ends(Postbox(one, mine), Postbox(other, known), Arena(memory, 0), mine, known)
    try:
        yield found
    finally:
        found.ours.close()
        found.theirs.close()
        memory.close()


def is_local(ends: Ends) -> bool:
    return ends.ours.connection.is_local


both = pytest.mark.parametrize("kind", ["unix", "tcp"])


@both
def test_tensors_inside_and_in_place_arrive_in_order(kind: str) -> None:
    with made(kind) as ends:
        inside = torch.arange(6.0).view(2, 3)
        shared = ends.arena.empty((4,), torch.int64).copy_(torch.arange(4))
        turned = ends.arena.empty((2, 3), torch.float32).copy_(inside).t()
        empty = torch.empty((0, 5), dtype=torch.bfloat16)
        letter = ends.post(inside, shared, turned, empty, torch.tensor(3.5))
        assert letter.message == MESSAGE
        for found, sent in zip(letter.tensors, (inside, shared, turned, empty, torch.tensor(3.5)), strict=True):
            assert torch.equal(found, sent)
            assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        shared.fill_(7)
        assert letter.tensors[1].tolist() == ([7] * 4 if is_local(ends) else [0, 1, 2, 3]), "read where it lies"


@both
def test_a_part_of_a_tensor_is_found_too(kind: str) -> None:
    with made(kind) as ends:
        shared = ends.arena.empty((10,), torch.float32).copy_(torch.arange(10.0))
        assert ends.post(shared[3:5]).tensors[0].tolist() == [3.0, 4.0]


@both
def test_memory_is_handed_over_once(kind: str) -> None:
    with made(kind) as ends:
        shared = ends.arena.empty((4,), torch.float32).fill_(1.0)
        ends.post(shared)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(5):
            shared.fill_(number)
            assert ends.post(shared).tensors[0].tolist() == [number] * 4
        assert len(os.listdir("/proc/self/fd")) == before


@both
def test_what_is_wanted_is_filled_in_place_or_sent_back(kind: str) -> None:
    with made(kind) as ends:
        out = ends.arena.empty((3,), torch.float32).zero_()
        letter = ends.post(wanted=(out,))
        assert letter.is_in_place is is_local(ends)
        letter.wanted[0].copy_(torch.tensor([1.0, 2.0, 3.0]))
        if is_local(ends):
            assert out.tolist() == [1.0, 2.0, 3.0]
        else:
            assert out.tolist() == [0.0] * 3
        plain = torch.zeros(2)
        letter = ends.post(wanted=(out, plain))
        assert not letter.is_in_place, "one of them is not"
        assert [tuple(one.shape) for one in letter.wanted] == [(3,), (2,)]


def test_a_memory_that_is_gone_is_forgotten_by_who_had_it_from_us() -> None:
    """A server passes on to its replicas what lies in a worker's memory; when the worker is gone, so is that."""
    with made("unix") as ends:
        guest = SharedMemory.create(1 << 20)
        number = ends.mine.add(guest)
        arrived = ends.post(guest.tensor(0, 4, torch.float32)).tensors[0]
        others = len(ends.known._known)
        ends.mine.remove(number)
        assert ends.post(torch.zeros(1)).tensors[0].tolist() == [0.0]
        assert len(ends.known._known) == others - 1
        assert arrived.tolist() == [0.0] * 4, "what is in use stays"
        del arrived, guest
        gc.collect()
        kept = ends.arena.empty((1,), torch.float32).fill_(2.0)
        assert ends.post(kept).tensors[0].tolist() == [2.0]


class Vanishing(Memories):
    """A memory that goes as soon as it was found that a tensor lies in it."""

    guest = 0

    def find(self, tensor: torch.Tensor) -> Reference | None:
        found = super().find(tensor)
        if found is not None and self.has(self.guest):
            self.remove(self.guest)
        return found


@both
def test_a_memory_that_goes_while_it_is_shown_is_not_needed(kind: str) -> None:
    mine = Vanishing()
    with made(kind, mine) as ends:
        guest = SharedMemory.create(1 << 20)
        tensor = guest.tensor(0, 2, torch.float32).fill_(4.0)
        mine.guest = mine.add(guest)
        assert ends.post(tensor).tensors[0].tolist() == [4.0, 4.0]
        assert mine.has(mine.guest) is not is_local(ends), "between hosts no memory is shown"


FLOATS = TensorSpec("float32", (4,))


@pytest.mark.parametrize(
    ("letter", "message"),
    [
        (_Letter(MESSAGE, (FLOATS,), (Reference(9, 0),)), "where it has no memory"),
        (_Letter(MESSAGE, (FLOATS,), (Reference(1, 1 << 24),)), "where it has no memory"),
        (_Letter(MESSAGE, (FLOATS,), (Reference(1, -4),)), "where it has no memory"),
        (_Letter(MESSAGE, (FLOATS,), (Reference(1, 2),)), "between two elements"),
        (_Letter(MESSAGE, (FLOATS,), ()), "does not say of all its tensors"),
        (_Letter(MESSAGE, (FLOATS,), (None,)), "other tensors than its letter says"),
        (_Letter(MESSAGE, (), (), (FLOATS,), (Reference(9, 0),)), "where it has no memory"),
        (_Letter(MESSAGE, (TensorSpec("float32", (-1,)),), (Reference(1, 0),)), "shape|extent|negative"),
        (_Letter(MESSAGE, (TensorSpec("float3", (1,)),), (Reference(1, 0),)), "float3"),
    ],
)
def test_bad_letters_are_refused(letter: _Letter, message: str) -> None:
    with made("unix") as ends:
        ends.post(ends.arena.empty((4,), torch.float32))
        ends.ours.connection.send("request", letter, deadline=soon())
        with pytest.raises(ProtocolError, match=message):
            ends.theirs.receive(deadline=soon())


@both
def test_a_body_that_is_none_and_tensors_that_nobody_announced(kind: str) -> None:
    with made(kind) as ends:
        ends.ours.connection.send("request", 5, deadline=soon())
        with pytest.raises(ProtocolError, match="not a _Letter"):
            ends.theirs.receive(deadline=soon())
        letter = _Letter(MESSAGE, (spec_of(torch.zeros(2)),), (None,))
        ends.ours.connection.send("request", letter, [torch.zeros(3)], deadline=soon())
        with pytest.raises(ProtocolError, match="other tensors"):
            ends.theirs.receive(deadline=soon())


def test_between_hosts_nobody_takes_memory() -> None:
    """Not even from one who claims to hand it over: descriptors need a Unix socket."""
    with made("tcp") as ends:
        ends.post(ends.arena.empty((4,), torch.float32))
        assert not ends.known._known
        ends.ours.connection.send("memory", 1, deadline=soon())
        ends.ours.connection.socket.sendall(b"F")
        with pytest.raises(ProtocolError, match="other than 1 descriptors"):
            ends.theirs.receive(deadline=soon())
