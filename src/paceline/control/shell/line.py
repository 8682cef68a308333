"""One connection of the control plane, read and written by one thread without ever waiting for only one of the two.

What is to be sent is kept by kind, the newest only: messages here are state, not news. So nobody who puts something
waits, however slow the reader is, and a reader that stood still gets one message, not a backlog. Frames in both
directions are moved in pieces, so two sides that send large frames to each other do not block each other.

Threads: `put` and `ring` from any; everything else from the one thread that serves the line.
Failure: a lost connection raises `ConnectionLost`, bytes that are no frame `ProtocolError`; the line is then of no
further use.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from paceline.control.shell.outbox import Outbox
from paceline.errors import ProtocolError
from paceline.wire import frame
from paceline.wire.connection import Connection, drop_sent
from paceline.wire.descriptors import eventfd
from paceline.wire.waiting import READ

# A plan of thousands of members, or the lines of a model with as many parameters, in one frame.
LIMITS = frame.Limits(header_bytes=1 << 25, payload_bytes=0, num_tensors=0)
FRAMES_A_TURN = 16


class Bell:
    """Wakes one thread that waits for descriptors. Rung any number of times, it wakes once."""

    def __init__(self) -> None:
        self._signal = eventfd()
        self._lock = threading.Lock()
        self._rung = False

    def ring(self) -> None:
        with self._lock:
            if not self._rung and self._signal.number >= 0:
                self._rung = True
                os.eventfd_write(self._signal.fileno(), 1)

    def silence(self) -> None:
        with self._lock:
            if self._rung:
                self._rung = False
                os.eventfd_read(self._signal.fileno())

    def fileno(self) -> int:
        return self._signal.fileno()

    def close(self) -> None:
        with self._lock:
            self._signal.close()


class ControlConnection:
    """Made by the thread that serves it. `bell` belongs to the caller; it wakes that thread."""

    def __init__(self, connection: Connection, bell: Bell) -> None:
        self.connection = connection
        self.heard = time.monotonic()
        self._bell = bell
        self._server = threading.get_ident()
        self._lock = threading.Lock()
        self._outbox = Outbox()
        self._sending: deque[memoryview] = deque()
        self._buffer = bytearray(frame.PREFIX.size)
        self._missing = memoryview(self._buffer)
        self._is_header = False

    # -- sending -----------------------------------------------------------------------------------------------------

    def put(self, kind: str, body: Any) -> None:
        """Send this as soon as the reader takes it, in place of an older one of its kind that was not sent yet."""
        with self._lock:
            self._outbox.put(kind, body)
        if threading.get_ident() != self._server:  # which sends anyway before it waits
            self._bell.ring()

    def ring(self) -> None:
        """Wake the thread that serves this line."""
        self._bell.ring()

    def has_unsent(self) -> bool:
        with self._lock:
            return bool(self._outbox or self._sending)

    def send(self) -> None:
        """As much as goes without waiting."""
        while self._sending or self._load():
            count = self.connection.send_some(list(self._sending))
            if count == 0:
                return
            drop_sent(self._sending, count)

    def _load(self) -> bool:
        with self._lock:
            if not self._outbox:
                return False
            self._sending.append(memoryview(frame.encode(*self._outbox.take())))
            return True

    # -- receiving ---------------------------------------------------------------------------------------------------

    def frames(self) -> Iterator[frame.Header]:
        """The whole frames that are there; at most some of them, so that a talker does not keep its listener from
        speaking."""
        for _ in range(FRAMES_A_TURN):
            header = self._next_frame()
            if header is None:
                return
            self.heard = time.monotonic()
            yield header

    def _next_frame(self) -> frame.Header | None:
        try:
            while True:
                while len(self._missing):
                    count = self.connection.receive_some(self._missing)
                    if count == 0:
                        return None
                    self._missing = self._missing[count:]
                if self._is_header:
                    header = frame.decode_header(self._buffer, 0, LIMITS)
                    self._expect(frame.PREFIX.size, is_header=False)
                    return header
                header_bytes, _ = frame.decode_prefix(self._buffer, LIMITS)
                self._expect(header_bytes, is_header=True)
        except ProtocolError as error:
            raise ProtocolError(f"{self.connection.peer}: {error}") from error

    def _expect(self, num_bytes: int, *, is_header: bool) -> None:
        self._buffer = bytearray(num_bytes)
        self._missing = memoryview(self._buffer)
        self._is_header = is_header

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, seconds: float) -> None:
        """Until there is something to receive or to send, the bell rings, or the time is over."""
        if self.connection.has_buffered():
            seconds = 0.0
        poll = select.poll()
        poll.register(self._bell.fileno(), READ)
        events = self.connection.receive_events | (self.connection.send_events if self._sending else 0)
        poll.register(self.connection.fileno(), events)
        poll.poll(max(0.0, seconds) * 1000)
        self._bell.silence()

    def close(self) -> None:
        self.connection.close()
