"""Locks in shared memory that tell the end of their holder in a fraction of a millisecond.

When a process ends, the kernel first releases its robust locks, then frees its memory, and only then closes its
descriptors. For a process that trains the second part takes tens of milliseconds, so neither its connections nor its
pidfd speak of its death before. Whoever waits for such a lock is told at once: the holder died.

    LifelineHolder    holds one lock for each watcher, from a thread of its own, until it is released
    LifelineWatcher   waits for one lock, on a thread of its own; calls back if its holder died

A lock has one watcher only: the kernel wakes one waiter. A lock that is released in order says nothing. None of this
replaces connections and pidfds, which also see what no lock tells: where there are no robust locks, nothing happens.
"""

from __future__ import annotations

import ctypes
import errno
import threading
import time
from collections.abc import Callable

LOCK_BYTES = 64  # more than a pthread_mutex_t anywhere
_ATTRIBUTE_BYTES = 64
_SHARED = _ROBUST = 1
_CLOCK_MONOTONIC = 1
_LOOK_S = 0.25  # how often a watcher looks whether it is still wanted
_HELD_S = 5.0


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def _load() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    try:
        for name in ("init", "lock", "unlock", "consistent", "clocklock"):
            function = getattr(libc, f"pthread_mutex_{name}")
            function.argtypes = {"init": [ctypes.c_void_p] * 2}.get(name, [ctypes.c_void_p])
        libc.pthread_mutex_clocklock.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
        for name in ("init", "setpshared", "setrobust"):
            function = getattr(libc, f"pthread_mutexattr_{name}")
            function.argtypes = [ctypes.c_void_p] if name == "init" else [ctypes.c_void_p, ctypes.c_int]
    except AttributeError:
        return None
    return libc


_libc = _load()


class LifelineHolder:
    """`keep` is whatever keeps the memory at `address` mapped, which has room for `count` locks. They are held when the
    constructor returns."""

    def __init__(self, address: int, count: int, keep: object) -> None:
        self._addresses = [address + number * LOCK_BYTES for number in range(count)]
        self._keep = keep
        self._held = threading.Event()
        self._let_go = threading.Event()
        if _libc is None or not count:
            return
        # The thread owns the locks: whoever makes this may end before the process does.
        threading.Thread(target=self._hold, name="paceline-lifeline", daemon=True).start()
        self._held.wait(_HELD_S)

    def _hold(self) -> None:
        assert _libc is not None
        attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
        _libc.pthread_mutexattr_init(attributes)
        _libc.pthread_mutexattr_setpshared(attributes, _SHARED)
        _libc.pthread_mutexattr_setrobust(attributes, _ROBUST)
        for address in self._addresses:
            _libc.pthread_mutex_init(address, attributes)
            _libc.pthread_mutex_lock(address)
        self._held.set()
        self._let_go.wait()
        for address in self._addresses:
            _libc.pthread_mutex_unlock(address)

    def close(self) -> None:
        """Release the locks, in order."""
        self._let_go.set()


class LifelineWatcher:
    """`on_death` is called once, on the watcher's thread, if the holder of the lock at `address` ends without having
    released it."""

    def __init__(self, address: int, keep: object, on_death: Callable[[], None]) -> None:
        self._address = address
        self._keep = keep
        self._on_death = on_death
        self._closed = False
        if _libc is not None:
            threading.Thread(target=self._watch, name="paceline-watcher", daemon=True).start()

    def _watch(self) -> None:
        assert _libc is not None
        while not self._closed:
            result = _libc.pthread_mutex_clocklock(self._address, _CLOCK_MONOTONIC, ctypes.byref(_in(_LOOK_S)))
            if result == errno.ETIMEDOUT:
                continue
            if result == errno.EOWNERDEAD:
                _libc.pthread_mutex_consistent(self._address)
            if result in (0, errno.EOWNERDEAD):
                _libc.pthread_mutex_unlock(self._address)
            if result == errno.EOWNERDEAD and not self._closed:
                self._on_death()
            return

    def close(self) -> None:
        """Soon after, the thread ends."""
        self._closed = True


def _in(seconds: float) -> _Timespec:
    at = time.monotonic_ns() + int(seconds * 1e9)
    return _Timespec(at // 1_000_000_000, at % 1_000_000_000)
