"""One connection to one peer: frames over a non-blocking stream socket, plain or TLS, TCP or Unix.

Used by one thread at a time in each direction; with TLS by one thread at a time in all (an SSL object is not safe to
read and write at once). Whoever shares a connection between threads brings the lock.

Failure: any error but a `DeadlineExceeded` before the first byte leaves the stream in the middle of a frame, so the
connection is of no further use; close it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.errors import ConnectionLost, ProtocolError
from paceline.fault_points import FaultPoint
from paceline.wire import frame
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import creating, register
from paceline.wire.waiting import PLAIN, READ, WRITE, Waiter

if TYPE_CHECKING:
    import torch

# OpenSSL wants the very same bytes again after "want write"; small pieces also keep one call from hogging a turn.
TLS_PIECE_BYTES = 1 << 16
PLAIN_PIECES = 64
OPENING: FaultPoint[[socket.socket], socket.socket] = FaultPoint("a connection is made of a socket, or of another")
# TCP waits twice as long after every try in vain: a path that was down for 7 s would be tried again after 12.
RETRY_MS = 2000
TCP_RTO_MAX_MS = 44  # Linux 6.15; not in Python's `socket` yet


class Connection:
    """`peer` is how errors call the other side, e.g. "worker 3f2a at 10.0.0.2:4711"."""

    def __init__(self, sock: socket.socket, *, peer: str, waiter: Waiter = PLAIN) -> None:
        sock = OPENING.reach(sock) or sock
        sock.setblocking(False)
        self._sock = sock
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self.peer = peer
        self.is_local = sock.family == socket.AF_UNIX
        self.waiter = waiter
        # What to poll for when a direction would block; TLS may have to read in order to write, and the reverse.
        self.send_events = WRITE
        self.receive_events = READ
        # What the other end of TLS identified itself with; empty for the listening end, None without TLS.
        self.shown_certificate: bytes | None = None
        if not self.is_local:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.suppress(OSError):  # an older kernel
                sock.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, RETRY_MS)
        register(self)

    def fileno(self) -> int:
        return self._sock.fileno()

    def notice_dead_path(self, after_s: float) -> None:
        """Break with `ConnectionLost` when the other host has not answered for so long; the kernels ask each other, so
        a process that is stopped or busy answers too. Only for connections that carry little: one that is full because
        its reader is slow would break as well."""
        if self.is_local:
            return
        for option, value in (
            (socket.TCP_KEEPIDLE, 1),
            (socket.TCP_KEEPINTVL, 1),
            (socket.TCP_KEEPCNT, max(1, round(after_s))),
            (socket.TCP_USER_TIMEOUT, round(after_s * 1000)),
        ):
            self._sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @property
    def socket(self) -> socket.socket:
        return self._sock

    @property
    def closed(self) -> bool:
        return self._sock.fileno() < 0

    def close(self) -> None:
        with creating:
            self._sock.close()

    def abandon(self) -> None:
        number = self._sock.detach()
        if number >= 0:
            with contextlib.suppress(OSError):
                os.close(number)

    def has_buffered(self) -> bool:
        """Whether bytes were read off the socket already that poll will not speak of."""
        return self._tls is not None and self._tls.pending() > 0

    # -- bytes, without waiting --------------------------------------------------------------------------------------

    def send_some(self, pieces: Sequence[memoryview]) -> int:
        """Send from the front of `pieces` what goes without waiting; 0 when nothing does."""
        try:
            if self._tls is None:
                return self._sock.sendmsg(pieces[:PLAIN_PIECES])
            self.send_events = WRITE
            return self._tls.send(pieces[0][:TLS_PIECE_BYTES])
        except ssl.SSLWantReadError:
            self.send_events = READ
            return 0
        except (BlockingIOError, InterruptedError, ssl.SSLWantWriteError):
            return 0
        except (OSError, ValueError) as error:
            raise self._lost(error) from error

    def receive_some(self, into: memoryview) -> int:
        """Receive into `into` what is there; 0 when nothing is. Raises `ConnectionLost` at the end of the stream."""
        try:
            self.receive_events = READ
            count = self._sock.recv_into(into)
        except ssl.SSLWantWriteError:
            self.receive_events = WRITE
            return 0
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            return 0
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if count == 0:
            raise ConnectionLost(f"{self.peer} closed the connection")
        return count

    def _lost(self, error: Exception) -> ConnectionLost:
        return ConnectionLost(f"the connection to {self.peer} broke: {error}")

    # -- bytes, with waiting -----------------------------------------------------------------------------------------

    def send_all(self, pieces: Sequence[memoryview], deadline: Deadline) -> None:
        queue = deque(piece for piece in pieces if len(piece))
        while queue:
            count = self.send_some(list(queue))
            if count == 0:
                deadline.check(f"{self.peer} to take bytes")  # a wait alone would let a peer of one byte a ms pass it
                self.waiter.wait_any([(self.fileno(), self.send_events)], deadline, f"{self.peer} to take bytes")
            drop_sent(queue, count)

    def receive_all(self, into: memoryview, deadline: Deadline) -> None:
        while len(into):
            count = self.receive_some(into)
            if count == 0:
                deadline.check(f"bytes from {self.peer}")
                self.waiter.wait_any([(self.fileno(), self.receive_events)], deadline, f"bytes from {self.peer}")
            into = into[count:]

    # -- frames ------------------------------------------------------------------------------------------------------

    def send(self, kind: str, body: Any, tensors: Sequence[torch.Tensor] = (), *, deadline: Deadline) -> None:
        if not tensors:
            self.send_all([memoryview(frame.encode(kind, body))], deadline)
            return
        from paceline.wire import dtypes

        head = frame.encode(kind, body, [dtypes.spec_of(tensor) for tensor in tensors])
        self.send_all([memoryview(head), *map(dtypes.raw_bytes, tensors)], deadline)

    def receive_header(self, *, deadline: Deadline, limits: frame.Limits = frame.Limits()) -> tuple[frame.Header, int]:
        """The next frame's header and payload length; its payload must be received next."""
        prefix = bytearray(frame.PREFIX.size)
        self.receive_all(memoryview(prefix), deadline)
        try:
            header_bytes, payload_bytes = frame.decode_prefix(prefix, limits)
            header = bytearray(header_bytes)
            self.receive_all(memoryview(header), deadline)
            return frame.decode_header(header, payload_bytes, limits), payload_bytes
        except ProtocolError as error:
            raise ProtocolError(f"{self.peer}: {error}") from error

    def receive(
        self,
        *,
        deadline: Deadline,
        into: Sequence[torch.Tensor] | None = None,
        limits: frame.Limits = frame.Limits(),
    ) -> tuple[frame.Header, list[torch.Tensor]]:
        """The next whole frame. With `into`, its tensors are received straight into those."""
        header, payload_bytes = self.receive_header(deadline=deadline, limits=limits)
        if payload_bytes and not header.tensors:
            raise ProtocolError(
                f"{self.peer} sent a {header.kind!r} frame with {payload_bytes} bytes that no tensor claims"
            )
        return header, self.receive_tensors(header, deadline=deadline, into=into)

    def receive_tensors(
        self, header: frame.Header, *, deadline: Deadline, into: Sequence[torch.Tensor] | None = None
    ) -> list[torch.Tensor]:
        """The payload that belongs to a header that was just received."""
        if not header.tensors and not into:
            return []
        import torch

        from paceline.wire import dtypes

        if into is None:
            try:
                tensors = [torch.empty(spec.shape, dtype=dtypes.DTYPES[spec.dtype]) for spec in header.tensors]
            except RuntimeError as error:  # how torch says that there is no memory
                raise ProtocolError(
                    f"{self.peer} sent {describe(header.tensors)}, for which there is no memory here"
                ) from error
        else:
            tensors = list(into)
            here = tuple(map(dtypes.spec_of, tensors))
            if here != header.tensors:
                raise ProtocolError(f"{self.peer} sent {describe(header.tensors)} where {describe(here)} was expected")
        for tensor in tensors:
            self.receive_all(dtypes.raw_bytes(tensor), deadline)
        return tensors


def describe(specs: Sequence[frame.TensorSpec]) -> str:
    return ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in specs) or "no tensor"


def drop_sent(queue: deque[memoryview], count: int) -> None:
    """Take the first `count` bytes off the queue."""
    while count:
        first = queue[0]
        if count < len(first):
            queue[0] = first[count:]
            return
        count -= len(first)
        queue.popleft()
