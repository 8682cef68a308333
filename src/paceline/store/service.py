"""The table as a service: who comes must know its secret, and nothing listens beyond loopback unless asked."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from paceline.errors import WireError
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
        self._connections: set[Connection] = set()
        self._guard = threading.Lock()
        identity, secret, tls = Identity(), secrets.token_bytes(32), not is_loopback(host)
        self._endpoint = Endpoint(Credentials(identity, secret, "store"), host=host, tls=tls)
        self._endpoint.open_room(ROOM, self._serve)
        self.invitation = StoreInvitation(
            self._endpoint.address, self._endpoint.local_name, this_host(), secret, identity.fingerprint, tls
        )
        self._handlers: dict[str, calls.Handler] = {
            "set": lambda call, _: self._put(call.read(Pair), self._table.set),
            "append": lambda call, _: self._put(call.read(Pair), self._table.append),
            "add": lambda call, _: calls.Reply(self._table.add(*_fields(call, Amount))),
            "compare_set": lambda call, _: calls.Reply(self._table.compare_set(*_fields(call, CompareAndSet))),
            "get": lambda call, _: calls.Reply(self._get(call.read(Waited))),
            "wait": lambda call, _: calls.Reply(self._wait(call.read(Waited))),
            "check": lambda call, _: calls.Reply(self._table.check(call.read(Waited).keys)),
            "delete": lambda call, _: calls.Reply(self._table.delete(call.read(str))),
            "keys": lambda _, __: calls.Reply(self._table.keys()),
        }

    def _put(self, pair: Pair, put: Callable[[str, bytes], None]) -> calls.Reply:
        put(pair.key, pair.value)
        return calls.Reply()

    def _get(self, waited: Waited) -> bytes | None:
        return self._table.get(waited.keys[0], _turn(waited))

    def _wait(self, waited: Waited) -> bool:
        return self._table.wait(waited.keys, _turn(waited))

    def _serve(self, connection: Connection, _: Visitor) -> None:
        with self._guard:
            self._connections.add(connection)
        try:
            calls.serve(connection, self._handlers, idle_s=MAX_SECONDS, answer_s=ANSWER_S)
        except WireError:
            return  # the visitor's own connection: it will see, and nobody else minds
        finally:
            with self._guard:
                self._connections.discard(connection)
            connection.close()

    def close(self) -> None:
        self._table.close()
        self._endpoint.close()
        with self._guard:
            connections = list(self._connections)
        for connection in connections:
            with contextlib.suppress(OSError):  # its thread sees the end, and closes it
                connection.socket.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> StoreServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _turn(waited: Waited) -> Deadline:
    return Deadline(min(max(waited.timeout_s, 0.001), TURN_S), "waiting for keys of the store")


def _fields(call: calls.CallBody, kind: type[msgspec.Struct]) -> tuple[Any, ...]:
    return msgspec.structs.astuple(call.read(kind))
