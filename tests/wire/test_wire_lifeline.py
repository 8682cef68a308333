"""Locks that tell of the death of their holder: at once, once, and of nothing else."""

from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from paceline.testing.eventually import eventually
from paceline.wire.lifeline import LOCK_BYTES, LifelineHolder, LifelineWatcher
from paceline.wire.memory import SharedMemory

SOON_S = 10.0
NEVER_S = 0.6  # longer than a watcher waits between two looks


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory.create(16 * mmap.PAGESIZE)
    yield memory
    memory.close()


class Holding:
    """A forked process that holds locks, until it is told to release them or ends."""

    def __init__(self, memory: SharedMemory, count: int) -> None:
        ready, self._ready = os.pipe()
        self._wait, self._go = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever a test before this one made of it
            os.close(self._go)
            holder = LifelineHolder(memory.address, count, memory.buffer)
            os.write(self._ready, b"1")
            if os.read(self._wait, 1) == b"r":
                holder.close()
                time.sleep(0.2)
            os._exit(0)
        os.close(self._ready)
        os.close(self._wait)
        assert os.read(ready, 1) == b"1"
        os.close(ready)

    def tell(self, what: bytes) -> None:
        if what:
            os.write(self._go, what)
        os.close(self._go)

    def end(self, number: int) -> None:
        os.kill(self.pid, number)
        os.waitpid(self.pid, 0)
        self.tell(b"")


def wait_for_the_end_of_watchers() -> None:
    def have_ended() -> bool:
        return not any(thread.name == "paceline-watcher" for thread in threading.enumerate())

    eventually(have_ended, "the watchers end")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_every_watcher_hears_of_a_death_once(memory: SharedMemory, number: int) -> None:
    holding = Holding(memory, 3)
    heard: list[int] = []
    all_heard = threading.Semaphore(0)

    def died(which: int) -> None:
        heard.append(which)
        all_heard.release()

    for which in range(3):
        LifelineWatcher(memory.address + which * LOCK_BYTES, memory.buffer, lambda which=which: died(which))  # type: ignore[misc]
    holding.end(number)
    for _ in range(3):
        assert all_heard.acquire(timeout=SOON_S)
    assert sorted(heard) == [0, 1, 2]
    wait_for_the_end_of_watchers()


def test_a_death_from_before_the_watch_is_heard_of_too(memory: SharedMemory) -> None:
    holding = Holding(memory, 1)
    holding.end(signal.SIGKILL)
    heard = threading.Event()
    LifelineWatcher(memory.address, memory.buffer, heard.set)
    assert heard.wait(SOON_S)


def test_a_release_in_order_is_no_death(memory: SharedMemory) -> None:
    holding = Holding(memory, 1)
    heard = threading.Event()
    LifelineWatcher(memory.address, memory.buffer, heard.set)
    holding.tell(b"r")
    os.waitpid(holding.pid, 0)
    wait_for_the_end_of_watchers()
    assert not heard.is_set()


def test_who_no_longer_watches_hears_nothing(memory: SharedMemory) -> None:
    holding = Holding(memory, 1)
    heard = threading.Event()
    watcher = LifelineWatcher(memory.address, memory.buffer, heard.set)
    watcher.close()
    wait_for_the_end_of_watchers()
    holding.end(signal.SIGKILL)
    assert not heard.wait(NEVER_S)


def test_a_child_of_the_holder_keeps_nobody_alive(memory: SharedMemory) -> None:
    """As loader workers are: they have the memory, and their parent's end is told all the same."""
    readable, writable = os.pipe()
    waits, end = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(end)
        kept = LifelineHolder(memory.address, 1, memory.buffer)
        if os.fork() == 0:
            os.read(waits, 1)  # until the test has closed its end
            os._exit(0)
        os.write(writable, b"1")
        time.sleep(60)
        kept.close()
        os._exit(0)
    assert os.read(readable, 1) == b"1"
    os.close(readable)
    os.close(writable)
    heard = threading.Event()
    LifelineWatcher(memory.address, memory.buffer, heard.set)
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert heard.wait(SOON_S)
    os.close(waits)
    os.close(end)
