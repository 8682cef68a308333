"""Where processes that know nothing but an invitation and their rank find each other and form a group.

    parent                                         each of the processes
    with Meeting(size=4) as meeting:
        start processes, give them                 group = join(invitation, rank=r, size=4)
        meeting.invitation

The invitation holds the address, the secret and the certificate's fingerprint: hand it over like a password (standard
input, a file of mode 600), never as an argument of a command.
"""

from __future__ import annotations

import secrets
import threading
from typing import NamedTuple

import msgspec

from paceline.collective.group import DEFAULT_TIMEOUT_S, FORMING_S, Group
from paceline.wire import calls
from paceline.wire.card import Card
from paceline.wire.codes import AccessCode
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import is_loopback
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity

_ROOM = "meeting"


class Invitation(AccessCode, frozen=True, array_like=True):
    PREFIX = "paceline1:"
    WHAT = "an invitation"


class _Arrival(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    size: int
    card: Card


class _Roster(msgspec.Struct, frozen=True, array_like=True):
    name: str
    cards: tuple[Card, ...]


class Meeting:
    """Brings `size` processes together, once. TLS is on unless `host` is a loopback address."""

    def __init__(
        self, size: int, *, host: str = "127.0.0.1", tls: bool | None = None, timeout_s: float = FORMING_S
    ) -> None:
        if size < 1:
            raise ValueError(f"size={size} is not a number of processes; give 1 or more")
        self._size = size
        self._timeout_s = timeout_s
        self._name = secrets.token_hex(4)
        self._present: dict[int, Card] = {}
        self._changed = threading.Condition()
        secret = secrets.token_bytes(32)
        identity = Identity()
        use_tls = not is_loopback(host) if tls is None else tls
        self._endpoint = Endpoint(Credentials(identity, secret, "meeting"), host=host, tls=use_tls)
        self._endpoint.open_room(_ROOM, self._serve)
        self.invitation = Invitation(self._endpoint.address, secret, identity.fingerprint, use_tls).encode()

    def _serve(self, connection: Connection, _: Visitor) -> None:
        try:
            calls.serve(connection, {"meet": self._meet}, idle_s=self._timeout_s, answer_s=self._timeout_s)
        finally:
            connection.close()

    def _meet(self, request: calls.CallBody) -> object:
        arrival: _Arrival = request.read(_Arrival)
        deadline = Deadline(self._timeout_s, "meeting")
        with self._changed:
            self._check(arrival)
            self._present[arrival.rank] = arrival.card
            self._changed.notify_all()
            while len(self._present) < self._size:
                missing = sorted(set(range(self._size)) - set(self._present))
                deadline.check(f"ranks {missing} to arrive")
                self._changed.wait(deadline.remaining_s())
            return _Roster(self._name, tuple(self._present[rank] for rank in range(self._size)))

    def _check(self, arrival: _Arrival) -> None:
        if arrival.size != self._size:
            raise ValueError(f"rank {arrival.rank} expects {arrival.size} processes, this meeting is for {self._size}")
        if not 0 <= arrival.rank < self._size:
            raise ValueError(f"rank {arrival.rank} is not one of 0..{self._size - 1}")
        other = self._present.get(arrival.rank)
        if other is not None:
            raise ValueError(
                f"rank {arrival.rank} is taken by member {other.member}; give every process a rank of its own"
            )

    def close(self) -> None:
        self._endpoint.close()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Where(NamedTuple):
    """How a process takes part. `host` is the address it listens on: by default the one from which it reaches the
    meeting."""

    host: str | None = None
    tls: bool | None = None
    host_label: str = ""


def join(
    invitation: str,
    rank: int,
    size: int,
    *,
    where: Where = Where(),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    forming_s: float = FORMING_S,
) -> Group:
    """Come to the meeting, wait for the others, form the group. The group owns what was opened here."""
    invited = Invitation.decode(invitation)
    mine = Credentials(Identity(), invited.secret, "worker")
    deadline = Deadline(forming_s, f"joining the meeting at {invited.address[0]}:{invited.address[1]} as rank {rank}")
    connection = invited.dial(mine, _ROOM, deadline)
    try:
        host = where.host or connection.socket.getsockname()[0]
        endpoint = Endpoint(mine, host=host, tls=invited.tls if where.tls is None else where.tls)
        try:
            arrival = _Arrival(rank, size, Card.of(endpoint, where.host_label))
            roster = calls.call(connection, "meet", arrival, answer_type=_Roster, deadline=deadline)
            return Group.form(
                endpoint,
                roster.cards,
                rank,
                name=roster.name,
                timeout_s=timeout_s,
                forming_s=max(1.0, deadline.remaining_s()),
                ephemeral=True,
            )
        except BaseException:
            endpoint.close()
            raise
    finally:
        connection.close()
