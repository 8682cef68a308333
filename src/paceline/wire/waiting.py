"""How a wait for descriptors is done. Every wait in Paceline ends by one of these, so every wait has a deadline."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Protocol

from paceline.wire.deadline import Deadline

READ = select.POLLIN
WRITE = select.POLLOUT

Wanted = Sequence[tuple[int, int]]


class Waiter(Protocol):
    """Called by whoever must wait, on its own thread."""

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        """Return when one of the (descriptor, events) pairs is ready; raise `DeadlineExceeded`, or whatever else this
        waiter watches for (a group's waiter raises when a member died)."""


def is_ready(descriptor: int, events: int) -> bool:
    """Whether it is ready now, without waiting. One that another thread has just closed is not."""
    poll = select.poll()
    poll.register(descriptor, events)
    return any(happened & ~select.POLLNVAL for _, happened in poll.poll(0))


class PlainWaiter:
    """Watches for nothing but the deadline."""

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        poll = select.poll()
        for descriptor, events in wanted:
            poll.register(descriptor, events)
        if not poll.poll(deadline.remaining_ms()):
            raise deadline.error(waited_for)


PLAIN = PlainWaiter()
