"""Threads that decode a type of message for the first time at the same moment."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import msgspec

import paceline
from paceline.wire.decoding import decode


class Place(msgspec.Struct, frozen=True, array_like=True):
    number: int
    start: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    place: Place
    section: int
    state: dict[str, Place] = {}


class Push(msgspec.Struct, frozen=True, array_like=True):
    places: tuple[Place, ...] = ()
    parts: tuple[Part, ...] = ()


class Whole(msgspec.Struct, frozen=True):
    places: tuple[Place, ...] = ()
    parts: tuple[Part, ...] = ()
    pushes: tuple[Push, ...] = ()
    last: Push | None = None


PART = Part(Place(1, 2), 3, {"step": Place(4, 5)})
WHOLE = Whole((Place(1, 2),), (PART,), (Push((Place(1, 2),), (PART,)),), Push())


def _decode_at_once() -> None:
    """Where nobody sees to it that a decoder is made once, every fourth such process ends by a segmentation fault."""
    data = msgspec.msgpack.encode(WHOLE)
    barrier = threading.Barrier(6)

    def work() -> None:
        barrier.wait(10.0)
        assert decode(data, Whole) == WHOLE

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_type_is_decoded_by_several_threads_at_first() -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(24):  # one of which would crash, but for one time in a thousand
            child = os.fork()
            if child == 0:
                _decode_at_once()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        sys.setswitchinterval(interval)


def test_messages_are_decoded_in_one_place_only() -> None:
    source = Path(paceline.__file__).parent
    elsewhere = [
        str(path.relative_to(source))
        for path in sorted(source.rglob("*.py"))
        if "msgpack.decode(" in path.read_text() and path.name != "decoding.py"
    ]
    assert elsewhere == []
