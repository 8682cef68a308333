"""How a process reaches another whose place it knows: over a Unix socket on its own host, else over TCP."""

from __future__ import annotations

import socket
from typing import Protocol

from paceline.wire.card import this_host
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import dial
from paceline.wire.handshake import Credentials
from paceline.wire.waiting import PLAIN, Waiter


class Located(Protocol):
    """What must be known of a process to reach it: a card, a ticket, an invitation."""

    @property
    def host(self) -> str: ...
    @property
    def address(self) -> tuple[str, int]: ...
    @property
    def local_name(self) -> str: ...
    @property
    def fingerprint(self) -> bytes: ...
    @property
    def tls(self) -> bool: ...


def reach(
    mine: Credentials,
    located: Located,
    purpose: str,
    *,
    deadline: Deadline,
    host: str = "",
    waiter: Waiter = PLAIN,
    answer_s: float | None = None,
) -> Connection:
    """A connection to a process; the caller closes it. `host` is the caller's own, where it is not simply this machine.
    The other arguments are those of `dial`."""
    is_near = located.host == (host or this_host())
    return dial(
        mine,
        located.local_name if is_near else located.address,
        purpose,
        deadline=deadline,
        tls=located.tls,
        pin=located.fingerprint,
        waiter=waiter,
        answer_s=answer_s,
    )


def own_address(host: str, address: tuple[str, int]) -> str:
    """The address at which other members can reach this one: that from which it reaches the coordinator, which is on
    `host` at `address`."""
    if host == this_host():
        return address[0]
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
