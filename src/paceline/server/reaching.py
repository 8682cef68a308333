"""How a member of the run reaches a server: over a Unix socket on its own host, else over TCP."""

from __future__ import annotations

from paceline.wire.card import Card, this_host
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import dial
from paceline.wire.endpoint import Endpoint
from paceline.wire.waiting import PLAIN, Waiter

ROOM = "server"


def reach(endpoint: Endpoint, card: Card, deadline: Deadline, waiter: Waiter = PLAIN) -> Connection:
    """A connection to the server of this card; the caller closes it."""
    address = card.local_name if card.host == this_host() else card.address
    mine = endpoint.credentials
    return dial(
        mine,
        address,
        f"{ROOM}/{mine.identity.member}",
        deadline=deadline,
        tls=card.tls,
        pin=card.fingerprint,
        waiter=waiter,
    )
