"""One connection of the control plane."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from paceline.control.shell.line import Bell, ControlConnection
from paceline.errors import ConnectionLost, ProtocolError
from paceline.wire import frame
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline


@contextlib.contextmanager
def lines() -> Iterator[tuple[ControlConnection, ControlConnection]]:
    ends = [Connection(sock, peer="the other") for sock in socket.socketpair()]
    bells = [Bell(), Bell()]
    made = [ControlConnection(connection, bell) for connection, bell in zip(ends, bells, strict=True)]
    try:
        yield made[0], made[1]
    finally:
        for line, bell in zip(made, bells, strict=True):
            line.close()
            bell.close()


def receive(line: ControlConnection, sender: ControlConnection | None = None) -> frame.Header:
    deadline = Deadline(20.0, "a test")
    while True:
        if sender is not None:
            sender.send()
        for header in line.frames():
            return header
        deadline.check("a frame")
        line.wait(0.01)


def test_only_the_newest_of_a_kind_is_sent() -> None:
    with lines() as (here, there):
        for number in range(1000):
            here.put("state", number)
        here.put("other", "x")
        here.send()
        assert not here.has_unsent()
        assert (receive(there).read_body(int), receive(there).kind) == (999, "other")
        assert list(there.frames()) == []


def test_a_reader_that_stands_still_gets_the_newest_when_it_wakes() -> None:
    with lines() as (here, there):
        for number in range(20):  # far more than the socket takes
            here.put("state", str(number) * 100_000)
            here.send()
        assert here.has_unsent()
        seen = [receive(there, here).read_body(str)]
        while here.has_unsent():
            seen.append(receive(there, here).read_body(str))
        assert seen[-1] == "19" * 100_000
        assert len(seen) < 20


def test_two_large_frames_pass_each_other() -> None:
    with lines() as (here, there):
        large = "x" * (4 << 20)
        got: list[int] = []

        def talk(line: ControlConnection) -> None:
            line.put("large", large)
            deadline = Deadline(20.0, "a test")
            heard = False
            while not heard or line.has_unsent():
                deadline.check("the other's frame")
                line.send()
                line.wait(1.0)
                for header in line.frames():
                    got.append(len(header.read_body(str)))
                    heard = True

        threads = [threading.Thread(target=talk, args=(line,)) for line in (here, there)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert got == [len(large)] * 2


def test_the_bell_ends_a_wait_and_rings_once() -> None:
    with lines() as (here, _):
        woken = threading.Event()

        def wait() -> None:
            here.wait(20.0)
            woken.set()

        waiter = threading.Thread(target=wait)
        waiter.start()
        for _number in range(5):
            here.ring()
        assert woken.wait(10.0)
        waiter.join()
        here.wait(0.0)
        here.ring()
        here.ring()
        here.wait(20.0)


def test_a_ring_after_the_end_is_nothing() -> None:
    bell = Bell()
    bell.close()
    bell.ring()
    bell.silence()


@pytest.mark.parametrize("garbage", [b"\0" * 16, frame.PREFIX.pack(b"PLN1", 0, 0), frame.PREFIX.pack(b"PLN1", 8, 8)])
def test_bytes_that_are_no_frame_are_an_error(garbage: bytes) -> None:
    with lines() as (here, there):
        here.connection.socket.send(garbage)
        with pytest.raises(ProtocolError, match="the other"):
            receive(there)


def test_the_end_of_the_stream_is_an_error_also_within_a_frame() -> None:
    with lines() as (here, there):
        here.connection.socket.send(frame.encode("state", 5)[:20])
        assert list(there.frames()) == []
        here.close()
        with pytest.raises(ConnectionLost):
            receive(there)


def test_a_talker_lets_the_other_speak() -> None:
    with lines() as (here, there):
        here.connection.socket.send(frame.encode("state", 5) * 100)
        turns: list[int] = []
        while sum(turns) < 100:
            there.wait(1.0)
            turns.append(len(list(there.frames())))
        assert max(turns) < 50
