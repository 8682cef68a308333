"""The table as a service: who comes must know its secret, and nothing listens beyond loopback unless asked."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from paceline.store.table import KeyValueTable
from paceline.wire import calls
from paceline.wire.card import this_host
from paceline.wire.connection import Connection
from paceline.wire.deadline import MAX_SECONDS, Deadline
from paceline.wire.dialing import is_loopback
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity

ROOM = "store"
# A wait is cut into turns of this, so that a server that ends is not held up by who waits.
TURN_S = 10.0
ANSWER_S = 30.0


class StoreInvitation(msgspec.Struct, frozen=True):
    """How to reach a store. It holds the secret: hand it over like a password."""

    address: tuple[str, int]
    local_name: str
    host: str
    secret: bytes
    fingerprint: bytes
    tls: bool

    def __repr__(self) -> str:
        return f"StoreInvitation(address={self.address!r}, tls={self.tls})"


class Pair(msgspec.Struct, frozen=True, array_like=True):
    key: str
    value: bytes


class CompareAndSet(msgspec.Struct, frozen=True, array_like=True):
    key: str
    expected: bytes
    desired: bytes


class Amount(msgspec.Struct, frozen=True, array_like=True):
    key: str
    amount: int


class Waited(msgspec.Struct, frozen=True, array_like=True):
    keys: tuple[str, ...]
    timeout_s: float


class StoreServer:
    def __init__(self, *, host: str = "127.0.0.1") -> None:
        self._table = KeyValueTable()
        identity, secret, tls = Identity(), secrets.token_bytes(32), not is_loopback(host)
        self._endpoint = Endpoint(Credentials(identity, secret, "store"), host=host, tls=tls)
        self._callers = calls.Callers(self._serve)
        self._endpoint.open_room(ROOM, self._callers.welcome)
        self.invitation = StoreInvitation(
            self._endpoint.address, self._endpoint.local_name, this_host(), secret, identity.fingerprint, tls
        )
        self._handlers: dict[str, calls.Handler] = {
            "set": lambda call: self._table.set(*_fields(call, Pair)),
            "append": lambda call: self._table.append(*_fields(call, Pair)),
            "add": lambda call: self._table.add(*_fields(call, Amount)),
            "compare_set": lambda call: self._table.compare_set(*_fields(call, CompareAndSet)),
            "get": lambda call: self._get(call.read(Waited)),
            "wait": lambda call: self._wait(call.read(Waited)),
            "check": lambda call: self._table.check(call.read(Waited).keys),
            "delete": lambda call: self._table.delete(call.read(str)),
            "keys": lambda _: self._table.keys(),
        }

    def _get(self, waited: Waited) -> bytes | None:
        return self._table.get(waited.keys[0], _turn(waited))

    def _wait(self, waited: Waited) -> bool:
        return self._table.wait(waited.keys, _turn(waited))

    def _serve(self, connection: Connection, _: Visitor) -> None:
        calls.serve(connection, self._handlers, idle_s=MAX_SECONDS, answer_s=ANSWER_S)

    def close(self) -> None:
        self._table.close()
        self._endpoint.close()
        self._callers.close()

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _turn(waited: Waited) -> Deadline:
    return Deadline(min(max(waited.timeout_s, 0.001), TURN_S), "waiting for keys of the store")


def _fields(call: calls.CallBody, kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    return msgspec.structs.astuple(call.read(kind))
