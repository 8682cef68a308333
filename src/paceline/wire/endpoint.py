"""Where a process can be reached.

An endpoint listens on one TCP port and, for members of the same host, on one Unix socket in the abstract namespace:
that has no file, and is seen only inside its network namespace, so what reaches it really is on this host. A thread
accepts, short-lived threads do handshakes; a connection that passed waits, under its purpose, for whoever expects it.

    purpose = "<room>/<detail>"   e.g. "group 7f.3/watch/2"

`expect(purpose)` gives an `Expectation` with a descriptor to wait on, so a wait for a visitor can also end because a
member died. A room that is open keeps its visitors until it closes; visitors of a room that is not open yet (this
member is the later one) are kept for `PARKING_S`.

Strangers: visitors in their handshake are counted by address, and on the Unix socket by the user that the kernel names
(SO_PEERCRED). None may have more than its share, and places are kept for this user's own processes.

Failure: who does not finish its handshake within `HANDSHAKE_S`, speaks garbage or lacks the secret is closed and
logged once an address and reason; it has cost one thread and 4 KiB for that long.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable

from paceline.errors import AddressError, DeadlineExceeded, WireError
from paceline.wire import handshake
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import creating, eventfd, register
from paceline.wire.dialing import listen_tcp, resolve, wrap_tls
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.waiting import PLAIN, READ, Waiter, is_ready

logger = logging.getLogger("paceline.wire")

HANDSHAKE_S = 5.0
PARKING_S = 60.0
MAX_HANDSHAKES = 512
MAX_HANDSHAKES_OF_ONE = 128  # address, or user of this host
RESERVED_HANDSHAKES = 128  # of all, for processes of this user
OWN = "this user"
MAX_PARKED = 1024
MAX_LOGGED = 256

Handler = Callable[[Connection, Visitor], None]


class Expectation:
    """A visitor that somebody waits for; readable when it is there."""

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self._arrived = eventfd()
        self._visit: tuple[Connection, Visitor] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def deliver(self, connection: Connection, visitor: Visitor) -> None:
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._visit = (connection, visitor)
            os.eventfd_write(self._arrived.fileno(), 1)

    def fileno(self) -> int:
        return self._arrived.fileno()

    def is_there(self) -> bool:
        # The signal, not the visit, says that `deliver` is done: its descriptor must not be closed under it.
        if self._arrived.number >= 0:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._arrived.fileno())
                self._arrived.close()
        return self._arrived.number < 0

    def take(self) -> tuple[Connection, Visitor]:
        """The visitor, which is there; it belongs to the caller now."""
        assert self._visit is not None
        visit, self._visit = self._visit, None
        return visit

    def wait(self, deadline: Deadline, waited_for: str, waiter: Waiter = PLAIN) -> tuple[Connection, Visitor]:
        while not self.is_there():
            waiter.wait_any([(self.fileno(), READ)], deadline, waited_for)
        return self.take()

    def close(self) -> None:
        """Nobody waits any more; for an expectation that the endpoint no longer knows. A visitor not taken is sent
        away."""
        with self._lock:
            self._closed = True
            self._arrived.close()
            if self._visit is not None:
                self.take()[0].close()


class Endpoint:
    """Listens on `host` (loopback unless asked otherwise) from the moment it is made until `close`. `local_name` is
    given by a process that takes the place of an earlier one."""

    def __init__(
        self,
        credentials: Credentials,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: bool = False,
        local_name: str | None = None,
    ) -> None:
        self.credentials = credentials
        self.tls = tls
        self._lock = threading.Lock()
        self._rooms: dict[str, Handler | None] = {}
        self._expected: dict[str, Expectation] = {}
        self._parked: dict[str, tuple[float, Connection, Visitor]] = {}
        self._logged: set[tuple[str, str]] = set()
        self._closed = False
        self._handshakes: Counter[str] = Counter()
        self._on_close: list[Callable[[], None]] = []
        self._closing = eventfd()
        found = resolve(host, port)
        with creating:
            self._tcp = listen_tcp(host, port, *found)
            register(self)
        self.address: tuple[str, int] = self._tcp.getsockname()[:2]
        self.local_name = local_name or f"paceline-{secrets.token_hex(16)}"
        with creating:
            self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                self._unix.bind(f"\0{self.local_name}")
                self._unix.listen(256)
            except OSError as error:
                self.abandon()
                raise AddressError(
                    f"cannot listen as {self.local_name!r}: {error.strerror}; does the process that had this name "
                    "before still run?"
                ) from error
        self._acceptor = threading.Thread(target=self._accept_forever, name="paceline-accept", daemon=True)
        self._acceptor.start()

    # -- visitors ----------------------------------------------------------------------------------------------------

    def open_room(self, room: str, handler: Handler | None = None) -> None:
        """Visitors of this room are kept until it closes, or, with a handler, given to it on a thread of their own,
        also those who came before it opened."""
        with self._lock:
            self._rooms[room] = handler
            if handler is None:
                return
            early = [purpose for purpose in self._parked if _room_of(purpose) == room]
            visits = [self._parked.pop(purpose)[1:] for purpose in early]
        for visit in visits:
            threading.Thread(target=handler, args=visit, name="paceline-welcome", daemon=True).start()

    def close_room(self, room: str, *, opens_again: bool = False) -> None:
        """Send away who waits there; not if it may open again: they are likely there for that time, and have not
        heard yet that this one is over. Who has will be gone when it is expected."""
        with self._lock:
            self._rooms.pop(room, None)
            for purpose in [purpose for purpose in self._parked if _room_of(purpose) == room and not opens_again]:
                self._parked.pop(purpose)[1].close()
            for purpose in [purpose for purpose in self._expected if _room_of(purpose) == room]:
                del self._expected[purpose]

    def num_rooms(self) -> int:
        """How many rooms are open whose visitors somebody expects."""
        with self._lock:
            return sum(handler is None for handler in self._rooms.values())

    def expect(self, purpose: str, *, keeps_ended: bool = False) -> Expectation:
        """A visitor that has gone again is taken for one of an earlier try, unless what it left is wanted."""
        expectation = Expectation(purpose)
        with self._lock:
            parked = self._parked.pop(purpose, None)
            if parked is not None and not keeps_ended and is_ready(parked[1].fileno(), select.POLLRDHUP):
                parked[1].close()  # it came for an earlier try and has given up
                parked = None
            if parked is None:
                self._expected[purpose] = expectation
        if parked is not None:
            expectation.deliver(parked[1], parked[2])
        return expectation

    def _receive(self, connection: Connection, visitor: Visitor) -> None:
        with self._lock:
            self._drop_stale()
            handler = self._rooms.get(_room_of(visitor.purpose))
            expectation = self._expected.pop(visitor.purpose, None)
            if self._closed:  # while the visitor was in its handshake
                connection.close()
                return
            if handler is None and expectation is None:
                if len(self._parked) >= MAX_PARKED:
                    connection.close()
                    return
                if visitor.purpose in self._parked:
                    self._parked[visitor.purpose][1].close()  # the later one is the one that still waits
                self._parked[visitor.purpose] = (time.monotonic(), connection, visitor)
        if expectation is not None:
            expectation.deliver(connection, visitor)
        elif handler is not None:
            handler(connection, visitor)

    def _drop_stale(self) -> None:
        oldest = time.monotonic() - PARKING_S
        for purpose, (since, connection, _) in list(self._parked.items()):
            if since < oldest and _room_of(purpose) not in self._rooms:
                del self._parked[purpose]
                connection.close()

    # -- accepting ---------------------------------------------------------------------------------------------------

    def _accept_forever(self) -> None:
        poll = select.poll()
        for owner in (self._closing, self._tcp, self._unix):
            poll.register(owner.fileno(), READ)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(PARKING_S * 1000)}
            with self._lock:
                self._drop_stale()
            if self._closing.number in ready or self._closing.number < 0:
                return
            for listener in (self._tcp, self._unix):
                if listener.fileno() in ready:
                    self._accept_one(listener)

    def _accept_one(self, listener: socket.socket) -> None:
        try:
            with creating:
                sock, address = listener.accept()
                connection = Connection(sock, peer=_name_of(listener, address))
        except OSError as error:
            # Out of descriptors, or the visitor left again; a pause keeps a full table from becoming a busy loop.
            logger.warning("cannot accept a connection: %s", error)
            self._closing_soon(0.05)
            return
        origin = _origin_of(connection.peer, connection.socket)
        if not self._admit(origin):
            connection.close()
            return
        try:
            arguments = (connection, origin)
            threading.Thread(target=self._welcome, args=arguments, name="paceline-welcome", daemon=True).start()
        except RuntimeError as error:  # no more threads to be had
            self._dismiss(origin)
            connection.close()
            logger.warning("cannot welcome %s: %s", connection.peer, str(error))

    def _admit(self, origin: str) -> bool:
        """Whether one more may try its handshake now; who fills its own share keeps nobody else out, and all others
        together do not keep out the processes of this user, which the kernel vouches for."""
        with self._lock:
            others = self._handshakes.total() - self._handshakes[OWN]
            if origin == OWN:
                if self._handshakes[OWN] >= RESERVED_HANDSHAKES:
                    return False
            elif self._handshakes[origin] >= MAX_HANDSHAKES_OF_ONE or others >= MAX_HANDSHAKES - RESERVED_HANDSHAKES:
                return False
            self._handshakes[origin] += 1
            return True

    def _dismiss(self, origin: str) -> None:
        with self._lock:
            self._handshakes[origin] -= 1
            if not self._handshakes[origin]:
                del self._handshakes[origin]

    def _closing_soon(self, seconds: float) -> None:
        with contextlib.suppress(DeadlineExceeded, ValueError):
            PLAIN.wait_any([(self._closing.fileno(), READ)], Deadline(seconds, "accept"), "room for a connection")

    def _welcome(self, connection: Connection, origin: str) -> None:
        try:
            deadline = Deadline(HANDSHAKE_S, f"handshake with {connection.peer}")
            if not connection.is_local and _only_looked(connection, deadline):
                connection.close()
                return
            if self.tls and not connection.is_local:
                connection = wrap_tls(connection, self.credentials.identity.server_context, deadline, server=True)
            visitor = handshake.receive_visitor(connection, self.credentials, deadline=deadline)
        except WireError as error:
            connection.close()
            self._log_refusal(connection.peer, error)
            return
        finally:
            self._dismiss(origin)
        connection.peer = f"{visitor.role} {visitor.member}"
        self._receive(connection, visitor)

    def _log_refusal(self, peer: str, error: WireError) -> None:
        key = (peer.rpartition(":")[0], type(error).__name__)
        with self._lock:
            if key in self._logged or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add(key)
        logger.warning("refused %s: %s (further ones of this kind from there are not logged)", peer, str(error))

    # -- the end -----------------------------------------------------------------------------------------------------

    def on_close(self, callback: Callable[[], None]) -> None:
        """Let something that was built on this endpoint end with it."""
        self._on_close.append(callback)

    def close(self) -> None:
        """Stop listening; connections that were handed out live on."""
        if self._closing.number < 0:
            return
        for callback in self._on_close:
            callback()
        os.eventfd_write(self._closing.fileno(), 1)
        self._acceptor.join()
        with self._lock:
            self._closed = True
            for _, connection, _ in self._parked.values():
                connection.close()
            self._parked.clear()
        for owner in (self._tcp, self._unix, self._closing):
            owner.close()

    def abandon(self) -> None:
        for listener in (self._tcp, getattr(self, "_unix", None)):
            if listener is not None and listener.fileno() >= 0:
                os.close(listener.detach())

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _origin_of(peer: str, sock: socket.socket) -> str:
    """Whose share of handshakes a visitor takes: that of its user, where the kernel says who that is, else that of its
    address."""
    if sock.family != socket.AF_UNIX:
        return peer.rpartition(":")[0]
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return OWN if uid == os.geteuid() else f"user {uid}"


def _room_of(purpose: str) -> str:
    return purpose.partition("/")[0]


def _only_looked(connection: Connection, deadline: Deadline) -> bool:
    """Whether a visitor that has to speak first left without a word: it found out that it can reach us. Nobody need
    hear of that."""
    PLAIN.wait_any([(connection.fileno(), READ)], deadline, f"{connection.peer} to speak")
    try:
        return connection.socket.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True  # it reset the connection


def _name_of(listener: socket.socket, address: object) -> str:
    if listener.family == socket.AF_UNIX:
        return "a process of this host"
    assert isinstance(address, tuple)
    return f"{address[0]}:{address[1]}"
