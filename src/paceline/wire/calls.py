"""Request and response on a connection.

    caller   -> callee   "call"    operation and arguments
    callee   -> caller   "return"  the result, or "raise" with the error's text

One call at a time on a connection. A handler is a plain function of what was asked; it runs on the thread that called
`serve`. What it raises reaches the caller as `CallFailed`, and the connection stays good; only a broken connection ends
`serve`.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from paceline.errors import CallFailed, ConnectionLost, ProtocolError, WireError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.decoding import decode
from paceline.wire.frame import UNREADABLE
from paceline.wire.handshake import Visitor

logger = logging.getLogger("paceline.wire")

Answer = TypeVar("Answer")


class CallBody(msgspec.Struct, frozen=True, array_like=True):
    operation: str
    arguments: msgspec.Raw

    def read(self, arguments_type: type[Any]) -> Any:
        try:
            return decode(self.arguments, arguments_type)
        except UNREADABLE as error:
            raise ProtocolError(f"{self.operation}: arguments that cannot be read: {error}") from error


Handler = Callable[[CallBody], object]


def call(
    connection: Connection, operation: str, arguments: Any = None, *, answer_type: type[Answer], deadline: Deadline
) -> Answer:
    """Ask, and wait for the answer."""
    send_call(connection, operation, arguments, deadline=deadline)
    header, _ = connection.receive(deadline=deadline)
    if header.kind == "raise":
        raise CallFailed(f"{operation} on {connection.peer}: {header.read_body(str)}")
    if header.kind != "return":
        raise ProtocolError(f"{connection.peer} answered {operation} with {header.kind!r}")
    return header.read_body(answer_type)


def send_call(connection: Connection, operation: str, arguments: Any = None, *, deadline: Deadline) -> None:
    """Ask, for who takes the answer by itself."""
    request = CallBody(operation, msgspec.Raw(msgspec.msgpack.encode(arguments)))
    connection.send("call", request, deadline=deadline)


def serve(connection: Connection, handlers: Mapping[str, Handler], *, idle_s: float, answer_s: float) -> None:
    """Answer calls until the caller closes. Each wait for a call lasts at most `idle_s`, each answer `answer_s`."""
    while True:
        try:
            header, _ = connection.receive(deadline=Deadline(idle_s, f"serving {connection.peer}"))
        except ConnectionLost:
            return
        if header.kind != "call":
            raise ProtocolError(f"{connection.peer} sent {header.kind!r} where a call was expected")
        request = header.read_body(CallBody)
        deadline = Deadline(answer_s, f"answering {request.operation} of {connection.peer}")
        kind, answer = _answer(handlers, request)
        try:
            connection.send(kind, answer, deadline=deadline)
        except ConnectionLost:
            return
        except (TypeError, ValueError, OverflowError) as error:  # an answer that cannot be sent; nothing of it was
            connection.send("raise", f"{type(error).__name__}: {error}", deadline=deadline)


def _answer(handlers: Mapping[str, Handler], request: CallBody) -> tuple[str, object]:
    """What there is to send. An error of the sending is none of it: a "raise" after half a frame would be read as the
    rest of that frame."""
    try:
        handler = handlers.get(request.operation)
        if handler is None:
            raise ProtocolError(f"there is no operation {request.operation!r} here")
        return "return", handler(request)
    except Exception as error:
        return "raise", f"{type(error).__name__}: {error}"


class Callers:
    """Connections on which calls are answered; `serve` answers one visitor until it ends."""

    def __init__(self, serve: Callable[[Connection, Visitor], None]) -> None:
        self._serve = serve
        self._changed = threading.Condition()
        self._connections: set[Connection] = set()

    def welcome(self, connection: Connection, visitor: Visitor) -> None:
        with self._changed:
            self._connections.add(connection)
        try:
            self._serve(connection, visitor)
        except WireError as error:
            logger.info("closed the connection of %s: %s", connection.peer, error)
        finally:
            with self._changed:
                self._connections.discard(connection)
                connection.close()
                self._changed.notify_all()

    def num_connections(self) -> int:
        with self._changed:
            return len(self._connections)

    def close(self) -> None:
        with self._changed:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # wakes the thread that reads from it
                    connection.socket.shutdown(socket.SHUT_RDWR)
            self._changed.wait_for(lambda: not self._connections, 5.0)
