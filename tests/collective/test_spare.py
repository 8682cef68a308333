"""The memory of the next group: ready in advance, given once, and gone when nobody wants it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.collective.neighbourhood import FIXED_BYTES
from paceline.collective.spare import SpareMemory
from paceline.testing.eventually import eventually
from paceline.wire.memory import SharedMemory

TENSOR_BYTES = 1 << 22


@pytest.fixture
def memory() -> Iterator[SpareMemory]:
    memory = SpareMemory()
    yield memory
    memory.close()


def taken(memory: SpareMemory) -> SharedMemory:
    found = eventually(memory.take, "spare memory is ready")
    assert found is not None
    return found


def test_it_is_touched_where_tensors_will_lie_and_given_once(memory: SpareMemory) -> None:
    memory.prepare(TENSOR_BYTES, pause_s=0.0)
    found = taken(memory)
    assert found.num_bytes > FIXED_BYTES
    assert found.committed_bytes() >= TENSOR_BYTES
    assert memory.take() is None
    found.close()


def test_another_one_is_made_when_asked_for(memory: SpareMemory) -> None:
    for _ in range(2):
        memory.prepare(TENSOR_BYTES, pause_s=0.0)
        taken(memory).close()


def memories() -> set[str]:
    """The shared memories of this process, by descriptor."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if "memfd:paceline" in os.readlink(entry):
                found.add(entry.name)
    return found


def test_what_nobody_took_is_closed_and_nothing_comes_after(memory: SpareMemory) -> None:
    before = memories()
    memory.prepare(TENSOR_BYTES, pause_s=0.0)
    eventually(lambda: memories() - before, "memory is made")
    memory.close()
    assert memories() == before
    memory.prepare(TENSOR_BYTES, pause_s=0.0)
    assert memory.take() is None
    assert memories() == before
