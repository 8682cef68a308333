"""The coordinator's connections: who is on the line, and who may say what.

Only the newest connection of a member or agent counts; the loss of an older one is no news. A visitor speaks for
itself only: its id in the handshake must be the one in its reports, and once a member has introduced itself, its
certificate must be the one that it introduced. Whoever breaks this, or sends what cannot be read, loses its
connection; nobody else notices.

Threads: the endpoint gives every connection a thread, which reads and writes it until it ends.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from paceline.control.shell.line import Bell, ControlConnection
from paceline.errors import ConnectionLost, ProtocolError, WireError
from paceline.wire.connection import Connection
from paceline.wire.frame import Header
from paceline.wire.handshake import Visitor

logger = logging.getLogger("paceline.control")

UNHEARD_S = 1200.0  # a line without a word for so long is closed: its host is gone, without having said so
TURN_S = 60.0


class Switchboard:
    """Called on the connection's thread: `admit` before the connection counts, `arrived` when it does, `hear` for every
    frame, `left` when a newest connection is lost (not when this side closes it). All but the last may raise
    `WireError` to close the connection."""

    def __init__(
        self,
        roles: tuple[str, ...],
        *,
        admit: Callable[[Visitor], None],
        arrived: Callable[[Visitor], None],
        left: Callable[[Visitor], None],
        hear: Callable[[Visitor, Header], None],
    ) -> None:
        self._roles = roles
        self._admit, self._arrived, self._left, self._hear = admit, arrived, left, hear
        self._changed = threading.Condition()
        self._lines: dict[str, ControlConnection] = {}
        self._num_threads = 0
        self._ends_at: float | None = None

    def welcome(self, connection: Connection, visitor: Visitor) -> None:
        """Serve a connection until it ends; the handler of a room."""
        bell = Bell()
        line = ControlConnection(connection, bell)
        with self._counted():
            try:
                if visitor.role not in self._roles:
                    raise ProtocolError(f"it came as {visitor.role}; here are expected {', '.join(self._roles)}")
                self._admit(visitor)
                self._replace(visitor.member, line)
                self._arrived(visitor)
                self._converse(line, visitor)
            except ConnectionLost:
                pass
            except WireError as error:
                logger.warning("closed the connection of %s: %s", connection.peer, error)
            finally:
                line.close()
                if self._remove(visitor.member, line) and self._ends_at is None:
                    self._left(visitor)
                bell.close()

    def put(self, member: str, kind: str, body: Any) -> None:
        """Send this to a member, if it is on the line; the newest of a kind only. Does not wait."""
        with self._changed:
            line = self._lines.get(member)
        if line is not None:
            line.put(kind, body)

    def has_line(self, member: str) -> bool:
        with self._changed:
            return member in self._lines

    def num_lines(self) -> int:
        with self._changed:
            return len(self._lines)

    def is_quiet(self) -> bool:
        """Whether nobody is left to be sent anything."""
        with self._changed:
            lines = list(self._lines.values())
        return not any(line.has_unsent() for line in lines)

    def close(self, flush_s: float) -> None:
        """Send what is to be sent within `flush_s`, close all connections, and wait for their threads."""
        self._ends_at = time.monotonic() + flush_s
        with self._changed:
            for line in self._lines.values():
                line.ring()
            self._changed.wait_for(lambda: not self._num_threads, flush_s + 5.0)

    # -- a connection's thread ---------------------------------------------------------------------------------------

    def _converse(self, line: ControlConnection, visitor: Visitor) -> None:
        while True:
            line.send()
            if self._ends_at is not None and (time.monotonic() > self._ends_at or not line.has_unsent()):
                return
            line.wait(TURN_S if self._ends_at is None else self._ends_at - time.monotonic())
            for header in line.frames():
                if header.kind == "bye":
                    line.put("bye", None)
                    line.send()
                    return
                self._hear(visitor, header)
            if time.monotonic() - line.heard > UNHEARD_S or self._lines.get(visitor.member) is not line:
                return

    def _replace(self, member: str, line: ControlConnection) -> None:
        with self._changed:
            older = self._lines.get(member)
            self._lines[member] = line
        if older is not None:
            older.ring()

    def _remove(self, member: str, line: ControlConnection) -> bool:
        """Whether this was the newest connection of a member."""
        with self._changed:
            if self._lines.get(member) is not line:
                return False
            del self._lines[member]
            return True

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        with self._changed:
            self._num_threads += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_threads -= 1
                self._changed.notify_all()
