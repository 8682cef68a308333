"""By which address of this machine others reach a member."""

from __future__ import annotations

import socket

from paceline.wire.card import this_host


def own_address(host: str, address: tuple[str, int]) -> str:
    """The address at which other members can reach this one: that from which it reaches the coordinator, which is on
    `host` at `address`."""
    if host == this_host():
        return address[0]
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
