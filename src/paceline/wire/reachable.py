"""Whom this process can reach just now: dials that end as soon as the other side's kernel has answered.

A connection that is made says that bytes go both ways between the two hosts and that somebody listens there; the other
process need not do anything for it, so one that is stopped or busy is reached all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from paceline.errors import AddressError, DeadlineExceeded
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import connect
from paceline.wire.waiting import PLAIN

# One after the other: a single packet that is lost must not look like a host that is. A second in all.
TRIES_S = (0.3, 0.7)


def unreachable(addresses: Mapping[str, tuple[str, int]]) -> tuple[str, ...]:
    """The names, of those in `addresses`, that cannot be connected to, in their order. All are tried at once; returns
    after a second at the latest."""
    reached: set[str] = set()
    threads = [
        threading.Thread(target=_try, args=(name, address, reached), name="paceline-reach", daemon=True)
        for name, address in addresses.items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(name for name in addresses if name not in reached)


def _try(name: str, address: tuple[str, int], reached: set[str]) -> None:
    for limit_s in TRIES_S:
        try:
            connect(address, Deadline(limit_s, f"reaching {name}"), PLAIN).close()
        except (AddressError, DeadlineExceeded):
            continue
        reached.add(name)
        return
