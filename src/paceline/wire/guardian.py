"""A thread with a descriptor table of its own: what only it holds is closed the moment this process dies.

When a process ends, each of its threads lets go of the memory and then of its descriptor table. The last thread to let
go of the memory frees it, which takes tens of milliseconds for a process that trains and seconds for a large one, and
only then lets go of its table. So a connection in the table that all threads share tells of a death that late. The
guardian has unshared its table: either it is not the last thread, and what it holds is closed at once; or it is, and
then the shared table is closed before. Whoever watches one connection of each hears of the death before that.

    kept = guardian.keep(connection.fileno())      then close the own copy: the guardian's is the only one
    guardian.drop(kept)

Where the kernel lacks the calls (close_range needs 5.9, pidfd_getfd 5.6) or forbids them, `keep` returns None.
"""

from __future__ import annotations

import ctypes
import os
import queue
import socket
import struct
import threading
from typing import NamedTuple

from paceline.wire.descriptors import creating

_CLOSE_RANGE, _PIDFD_GETFD = 436, 438  # the same on all architectures
_UNSHARE = 2
_LAST = 0xFFFF_FFFF
_ANSWER_S = 5.0
_RESET = struct.pack("ii", 1, 0)  # closing with this lingering resets a TCP connection instead of ending it in order


class _Order(NamedTuple):
    """`keep` a descriptor of the shared table, or drop one of the guardian's."""

    keep: bool
    number: int
    answer: queue.SimpleQueue[int]


class Guardian:
    """Used from any thread. One a process is enough: see `guardian`."""

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[bool] = queue.SimpleQueue()
        threading.Thread(target=self._guard, name="paceline-guardian", daemon=True).start()
        self.works = self._ready.get()

    def keep(self, number: int) -> int | None:
        """What the guardian calls its own copy of this descriptor; None if it cannot have one."""
        if not self.works:
            return None
        answer: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._orders.put(_Order(True, number, answer))
        try:
            kept = answer.get(timeout=_ANSWER_S)
        except queue.Empty:
            return None
        return kept if kept >= 0 else None

    def drop(self, kept: int) -> None:
        """Let go of a connection in order: the other side sees a byte, or over TCP a reset; a death sends neither."""
        self._orders.put(_Order(False, kept, queue.SimpleQueue()))

    def _guard(self) -> None:
        # Numbers only, from here on: an object that owns one would close it in the other table when it is collected.
        libc = ctypes.CDLL(None, use_errno=True)
        with creating:  # nobody forks while a second table holds the same descriptors
            works = libc.syscall(_CLOSE_RANGE, 3, _LAST, _UNSHARE) == 0
        if works:
            null = os.open(os.devnull, os.O_RDWR)
            for standard in (0, 1, 2):
                os.dup2(null, standard)
            os.close(null)
            shared = os.pidfd_open(os.getpid())  # leads to the table of the process's first thread
        self._ready.put(works)
        while works:
            keep, number, answer = self._orders.get()
            if keep:
                answer.put(libc.syscall(_PIDFD_GETFD, shared, number, 0))
            else:
                libc.send(number, b"\0", 1, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                libc.setsockopt(number, socket.SOL_SOCKET, socket.SO_LINGER, _RESET, len(_RESET))
                os.close(number)


_lock = threading.Lock()
_guardian: Guardian | None = None


def guardian() -> Guardian:
    """This process's own, made when it is first asked for."""
    global _guardian
    with _lock:
        if _guardian is None:
            _guardian = Guardian()
        return _guardian


def _forget() -> None:
    """A forked child has neither the thread nor what it holds."""
    global _guardian, _lock
    _guardian, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)
