"""Invitations: one line, CODE, with which somebody on another machine joins the run until it expires.

CODE does not hold the run's secret, or it could not expire. It leads to the *door*: an endpoint of its own with a
secret of its own, opened with the first invitation, where a visitor shows the token that CODE holds and gets the run's
`Ticket`. The coordinator keeps a hash of the token, its expiry and how often it may still be used, on disk, so that
invitations survive its death. The door's secret is derived from the run's, one way.

Failure: a CODE that is no CODE, or was cut, is a `ValueError`; one that is expired, used up or unknown to this run, or
that leads to somebody else, is `HandshakeRefused`. Every message says what to do.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from paceline.control.shell.ticket import Ticket
from paceline.errors import AddressError, HandshakeRefused
from paceline.wire import calls
from paceline.wire.codes import AccessCode
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.decoding import decode
from paceline.wire.dialing import is_loopback
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity

KEY = "invitation/"
PORT_KEY = "door port"
FORGOTTEN_S = 7 * 24 * 3600.0  # until then an expired invitation is answered as such
MAX_VALID_S = 30 * 24 * 3600.0
VISIT_S = 10.0
NOBODY_S = 5.0  # a coordinator that died is back by then
NOBODY_PAUSE_S = 0.2

_ROOM = "door"
_AGAIN = "ask for a new one: paceline invite, where the run was started"


class Invited(msgspec.Struct, frozen=True):
    """A new CODE. One that is `local_only` leads to a loopback address: nobody on another machine gets in with it."""

    code: str
    expires: float
    uses: int
    local_only: bool


class Code(AccessCode, frozen=True, array_like=True):
    PREFIX = "paceline-join1:"
    WHAT = "an invitation"

    token_id: str
    token: bytes
    expires: int


class _Visit(msgspec.Struct, frozen=True, array_like=True):
    token_id: str
    token: bytes


class _Answer(msgspec.Struct, frozen=True):
    ticket: Ticket | None = None
    refusal: str = ""


class _Invitation(msgspec.Struct, frozen=True, array_like=True):
    token_hash: bytes
    expires: float
    uses_left: int


class Door:
    """`host` is where it listens, `advertised` how others call that. `remember` must have its changes on disk when it
    returns; `remembered` is what was there at the start. Used from any thread."""

    def __init__(
        self,
        ticket: Ticket,
        identity: Identity,
        *,
        host: str,
        advertised: str,
        remember: Callable[[Mapping[str, bytes | None]], None],
        remembered: Mapping[str, bytes],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._ticket = ticket
        self._host, self._advertised = host, advertised
        self._remember = remember
        self._clock = clock
        self._lock = threading.Lock()
        self._credentials = Credentials(identity, hmac.digest(ticket.secret, b"paceline door", "sha256"), "door")
        self._endpoint: Endpoint | None = None
        self._port = int(remembered.get(PORT_KEY, b"0"))
        self._invitations = {
            key.removeprefix(KEY): decode(value, _Invitation)
            for key, value in remembered.items()
            if key.startswith(KEY)
        }
        if any(invitation.expires > clock() for invitation in self._invitations.values()):
            self._open()

    def invite(self, valid_s: float, uses: int) -> Invited:
        if not 0 < valid_s <= MAX_VALID_S:
            raise ValueError(f"valid_s={valid_s} is not between 0 and {MAX_VALID_S:.0f} s; give a time within a month")
        if uses < 1:
            raise ValueError(f"uses={uses} would let nobody in; give 1 or more")
        token_id, token = secrets.token_hex(8), secrets.token_bytes(16)
        expires = self._clock() + valid_s
        invitation = _Invitation(_hash(token), expires, uses)
        with self._lock:
            endpoint = self._endpoint or self._open()
            old = [key for key, known in self._invitations.items() if known.expires < self._clock() - FORGOTTEN_S]
            changes: dict[str, bytes | None] = {KEY + key: None for key in old}
            changes[PORT_KEY] = str(endpoint.address[1]).encode()
            changes[KEY + token_id] = msgspec.msgpack.encode(invitation)
            self._remember(changes)
            self._invitations[token_id] = invitation
            for key in old:
                del self._invitations[key]
        mine = self._credentials
        address = (self._advertised, endpoint.address[1])
        code = Code(
            address, mine.secret, mine.identity.fingerprint, endpoint.tls, token_id, token, int(expires)
        ).encode()
        return Invited(code, expires, uses, is_loopback(self._advertised))

    def _open(self) -> Endpoint:
        tls = not is_loopback(self._host)
        try:
            self._endpoint = Endpoint(self._credentials, host=self._host, port=self._port, tls=tls)
        except AddressError:
            if not self._port:
                raise
            self._endpoint = Endpoint(self._credentials, host=self._host, tls=tls)  # old codes lead nowhere now
        self._endpoint.open_room(_ROOM, self._serve)
        return self._endpoint

    def _serve(self, connection: Connection, _: Visitor) -> None:
        try:
            calls.serve(connection, {"enter": self._enter}, idle_s=VISIT_S, answer_s=VISIT_S)
        finally:
            connection.close()

    def _enter(self, request: calls.CallBody) -> object:
        visit: _Visit = request.read(_Visit)
        with self._lock:
            refusal = self._check(visit)
            if not refusal:
                known = self._invitations[visit.token_id]
                used = msgspec.structs.replace(known, uses_left=known.uses_left - 1)
                self._remember({KEY + visit.token_id: msgspec.msgpack.encode(used)})
                self._invitations[visit.token_id] = used
        return _Answer(refusal=refusal) if refusal else _Answer(self._ticket)

    def _check(self, visit: _Visit) -> str:
        known = self._invitations.get(visit.token_id)
        token_hash = known.token_hash if known else b"\0" * 32
        if not hmac.compare_digest(token_hash, _hash(visit.token)) or known is None:
            return "this run does not know this invitation"
        if known.expires <= self._clock():
            return f"this invitation expired {self._clock() - known.expires:.0f} s ago"
        return "" if known.uses_left > 0 else "this invitation is used up"

    def close(self) -> None:
        with self._lock:
            if self._endpoint is not None:
                self._endpoint.close()


def enter(text: str, *, deadline: Deadline) -> Ticket:
    """Show a CODE at the door that it leads to; the ticket to the run. Where nobody answers, the coordinator may be on
    its way back: it is tried again for `NOBODY_S`."""
    code = Code.decode(text)
    try:
        connection = _knock(code, deadline)
    except AddressError as error:
        remedy = "is the run still going on, and this machine in its network?"
        if code.expires < time.time():
            remedy = f"it has expired, {_AGAIN}"
        elif is_loopback(code.address[0]):
            remedy = (
                "is the run still going on? It listens on its own machine only: to let others join, start it with "
                "--listen ADDRESS, an address of that machine"
            )
        raise AddressError(f"the invitation leads to nobody: {error}; {remedy}") from error
    except HandshakeRefused as error:
        raise HandshakeRefused(f"another run answers at the address of this invitation ({error}); {_AGAIN}") from error
    try:
        visit = _Visit(code.token_id, code.token)
        answer = calls.call(connection, "enter", visit, answer_type=_Answer, deadline=deadline)
    finally:
        connection.close()
    if answer.ticket is None:
        raise HandshakeRefused(f"{answer.refusal}; {_AGAIN}")
    return answer.ticket


def _knock(code: Code, deadline: Deadline) -> Connection:
    mine = Credentials(Identity(), code.secret, "guest")
    ends_at = time.monotonic() + min(NOBODY_S, deadline.remaining_s())
    while True:
        try:
            return code.dial(mine, _ROOM, deadline)
        except AddressError:
            if time.monotonic() + NOBODY_PAUSE_S > ends_at or code.expires < time.time():
                raise
            time.sleep(NOBODY_PAUSE_S)


def _hash(token: bytes) -> bytes:
    return hashlib.sha256(b"paceline token\0" + token).digest()
