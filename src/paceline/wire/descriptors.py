"""Descriptors that a forked child must not keep.

A DataLoader worker is a fork of its trainer. If it inherits the trainer's sockets, the death of the trainer is not
seen by its peers until the loader worker is gone too, seconds later. So everything here that owns a descriptor
registers itself, and in a forked child all of it is closed at once.

Invariant: between the creation of a descriptor and its registration no fork can happen; `creating` guards that
moment. Hold it for non-blocking calls only.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol


class DescriptorOwner(Protocol):
    """Owns descriptors of this process."""

    def abandon(self) -> None:
        """Close them in a forked child, saying nothing to anybody: the parent goes on using its own copies."""


creating = threading.RLock()
_owners: weakref.WeakSet[DescriptorOwner] = weakref.WeakSet()


def register(owner: DescriptorOwner) -> None:
    _owners.add(owner)


def _abandon_all() -> None:
    try:
        for owner in list(_owners):
            with contextlib.suppress(OSError):
                owner.abandon()
        _owners.clear()
    finally:
        creating.release()


os.register_at_fork(before=creating.acquire, after_in_parent=creating.release, after_in_child=_abandon_all)


class Fd:
    """One descriptor with one owner: closed by `close`, by the garbage collector, or in a forked child."""

    __slots__ = ("__weakref__", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        register(self)

    def fileno(self) -> int:
        if self.number < 0:
            raise ValueError("this descriptor was closed (or belongs to the parent of this forked process)")
        return self.number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    abandon = close

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


def eventfd() -> Fd:
    """A signal without a name: each write adds to a count, each read takes one."""
    with creating:
        return Fd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK | os.EFD_SEMAPHORE))


def pidfd_of_self() -> Fd:
    """Becomes readable for whoever holds it when this process dies."""
    with creating:
        return Fd(os.pidfd_open(os.getpid()))
