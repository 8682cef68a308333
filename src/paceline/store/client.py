"""A process's view of a store. Every thread has a connection of its own, because one that waits holds its up."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from paceline.store.service import ROOM, TURN_S, Amount, CompareAndSet, Pair, StoreInvitation, Waited
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity
from paceline.wire.reaching import reach

CALL_S = 30.0


class StoreClient:
    """Raises `DeadlineExceeded` for keys that did not come, other errors of the wire if the store is gone."""

    def __init__(self, invitation: StoreInvitation) -> None:
        self.invitation = invitation
        self._credentials = Credentials(Identity(), invitation.secret, "worker")
        self._guard = threading.Lock()
        self._connections: dict[threading.Thread, Connection] = {}

    def set(self, key: str, value: bytes) -> None:
        self._call("set", Pair(key, value), type(None))

    def append(self, key: str, value: bytes) -> None:
        self._call("append", Pair(key, value), type(None))

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", Amount(key, amount), int))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return bytes(self._call("compare_set", CompareAndSet(key, expected, desired), bytes))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", Waited(tuple(keys), 0.0), bool))

    def delete(self, key: str) -> bool:
        return bool(self._call("delete", key, bool))

    def keys(self) -> list[str]:
        return list(self._call("keys", None, list[str]))

    def get(self, key: str, timeout_s: float) -> bytes:
        deadline = Deadline(timeout_s, f"get of the store's key {key!r}")
        while (value := self._call("get", self._turn([key], deadline), bytes | None)) is None:
            deadline.check("it to be set")
        return bytes(value)

    def wait(self, keys: Sequence[str], timeout_s: float) -> None:
        deadline = Deadline(timeout_s, f"wait for the store's keys {list(keys)}")
        while not self._call("wait", self._turn(keys, deadline), bool):
            deadline.check("all of them to be set")

    def _turn(self, keys: Sequence[str], deadline: Deadline) -> Waited:
        return Waited(tuple(keys), min(TURN_S, deadline.remaining_s()))

    def _call(self, operation: str, arguments: object, result: Any) -> Any:
        deadline = Deadline(CALL_S, f"{operation} in the store")
        connection = self._connection(deadline)
        try:
            return calls.call(connection, operation, arguments, answer_type=result, deadline=deadline)
        except BaseException:  # also Ctrl-C
            connection.close()  # an answer that comes late must not be taken for the next one's
            raise

    def _connection(self, deadline: Deadline) -> Connection:
        current = threading.current_thread()
        with self._guard:
            found = self._connections.get(current)
        if found is None or found.closed:
            found = reach(self._credentials, self.invitation, ROOM, deadline=deadline)
            with self._guard:
                for thread in [thread for thread in self._connections if not thread.is_alive()]:
                    self._connections.pop(thread).close()
                self._connections[current] = found
        return found

    def close(self) -> None:
        with self._guard:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
