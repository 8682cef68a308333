"""How a process reaches others: connect, TLS around it, handshake. And how it listens. Errors say what to do."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
import struct
from typing import Any

from paceline.errors import AddressError, ConnectionLost, DeadlineExceeded, HandshakeRefused, PacelineError
from paceline.wire import handshake
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import creating
from paceline.wire.handshake import Credentials
from paceline.wire.waiting import PLAIN, READ, WRITE, Waiter, is_ready


def dial(
    mine: Credentials,
    address: tuple[str, int] | str,
    purpose: str,
    *,
    deadline: Deadline,
    tls: bool,
    pin: bytes | None,
    waiter: Waiter = PLAIN,
    answer_s: float | None = None,
) -> Connection:
    """A connection that passed the handshake. `address` is (host, port), or the local name of an endpoint on this
    host, which needs no TLS. `pin` is the fingerprint that the other side must have; None accepts any that knows the
    secret. A host that does not answer at all for `answer_s` cannot be reached; without it, the deadline says."""
    connection = _reach(address, deadline, waiter, answer_s)
    try:
        if tls and not connection.is_local:
            connection = wrap_tls(connection, mine.identity.client_context, deadline, server=False)
        hello = handshake.dial(connection, mine, purpose, pin=pin, deadline=deadline)
    except BaseException:
        connection.close()
        raise
    connection.peer = f"{hello.role} {hello.member}"
    return connection


def _reach(address: tuple[str, int] | str, deadline: Deadline, waiter: Waiter, answer_s: float | None) -> Connection:
    if answer_s is None or isinstance(address, str) or deadline.remaining_s() <= answer_s:
        return connect(address, deadline, waiter)
    limit = Deadline(answer_s, deadline.operation)
    try:
        return connect(address, limit, waiter)
    except DeadlineExceeded as error:
        raise AddressError(
            f"cannot reach {address[0]}:{address[1]}: no answer for {answer_s:.0f} s; is its host up, and is a "
            "firewall in between?"
        ) from error


def listen_tcp(host: str, port: int, family: socket.AddressFamily, address: Any) -> socket.socket:
    """Listen on an address that `resolve` found for host and port."""
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(256)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise AddressError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose a free port (0 lets the system choose) "
            "and an address of this machine"
        ) from error
    return listener


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise AddressError(
            f"the host name {host!r} does not resolve ({error}); check its spelling, or give an IP address"
        ) from error
    family, _, _, _, address = found[0]
    return family, address


def connect(address: tuple[str, int] | str, deadline: Deadline, waiter: Waiter) -> Connection:
    if isinstance(address, str):
        peer = "a process of this host"
        family, target = socket.AF_UNIX, f"\0{address}"
    else:
        peer = f"{address[0]}:{address[1]}"
        family, target = resolve(*address)
    with creating:
        connection = Connection(socket.socket(family, socket.SOCK_STREAM), peer=peer, waiter=waiter)
    sock = connection.socket
    try:
        if connection.is_local:
            _connect_local(sock, target, deadline, peer)
            return connection
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
        while not is_ready(sock.fileno(), WRITE):
            waiter.wait_any([(sock.fileno(), WRITE)], deadline, f"{peer} to accept a connection")
        problem = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if problem:
            raise OSError(problem, os.strerror(problem))
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError) and not isinstance(error, PacelineError):
            raise AddressError(
                f"cannot reach {peer}: {error.strerror or error}; is the other side still running, "
                "and is a firewall in between?"
            ) from error
        raise


def _connect_local(sock: socket.socket, target: str, deadline: Deadline, peer: str) -> None:
    """A full backlog makes a non-blocking connect to a Unix socket fail instead of waiting (for Python, one with a
    timeout is non-blocking too), so this one blocks, and the kernel keeps the deadline."""
    sock.setblocking(True)
    seconds, fraction = divmod(deadline.remaining_s() or 0.001, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), int(fraction * 1e6) + 1))
    try:
        sock.connect(target)
    except BlockingIOError as error:
        raise deadline.error(f"{peer} to accept a connection") from error
    sock.setblocking(False)


def wrap_tls(connection: Connection, context: ssl.SSLContext, deadline: Deadline, *, server: bool) -> Connection:
    """The same connection, inside TLS. On an error the connection is closed."""
    peer = connection.peer
    try:
        with creating:
            sock = context.wrap_socket(connection.socket, server_side=server, do_handshake_on_connect=False)
            wrapped = Connection(sock, peer=peer, waiter=connection.waiter)
    except OSError as error:
        connection.close()
        raise ConnectionLost(f"{peer} left before TLS began: {error}") from error
    while True:
        try:
            sock.do_handshake()
            wrapped.shown_certificate = sock.getpeercert(binary_form=True) or b""
            return wrapped
        except ssl.SSLWantReadError:
            wanted = READ
        except ssl.SSLWantWriteError:
            wanted = WRITE
        except OSError as error:
            wrapped.close()
            raise HandshakeRefused(f"{peer} does not speak our TLS ({error}); is TLS on at both sides?") from error
        try:
            wrapped.waiter.wait_any([(sock.fileno(), wanted)], deadline, f"TLS with {peer}")
        except PacelineError:
            wrapped.close()
            raise


def is_loopback(host: str) -> bool:
    """Whether only processes of this host can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
