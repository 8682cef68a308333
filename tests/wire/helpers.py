"""What the tests of the wire share: pairs of connections, identities, forks, bounded waits."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import dial, wrap_tls
from paceline.wire.dtypes import NAMES
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

T = TypeVar("T")

WAIT_S = 20.0
SECRET = b"the secret of this run"
EVERY_DTYPE = list(NAMES)
PAIRS = ["unix", "tcp", "tls"]

_numbers = itertools.count()


def soon(operation: str = "a test") -> Deadline:
    return Deadline(WAIT_S, operation)


def in_background(work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


# -- connections -----------------------------------------------------------------------------------------------------


def tcp_sockets() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialer = socket.create_connection(listener.getsockname(), timeout=WAIT_S)
        accepted, _ = listener.accept()
    return dialer, accepted


@contextlib.contextmanager
def connected(kind: str, *, buffer_bytes: int | None = None) -> Iterator[tuple[Connection, Connection]]:
    """Two ends, "alice" and "bob", each named as the other one calls it."""
    sockets = socket.socketpair() if kind == "unix" else tcp_sockets()
    if buffer_bytes is not None:
        for sock in sockets:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    alice, bob = Connection(sockets[0], peer="bob"), Connection(sockets[1], peer="alice")
    if kind == "tls":
        identity = Identity()
        serving = in_background(lambda: wrap_tls(bob, identity.server_context, soon(), server=True))
        alice = wrap_tls(alice, identity.client_context, soon(), server=False)
        bob = serving.result(WAIT_S)
    try:
        yield alice, bob
    finally:
        alice.close()
        bob.close()


def read_to_end(sock: socket.socket) -> bytes:
    """What still comes until the other side closes; a reset is an end too."""
    sock.settimeout(WAIT_S)
    received = b""
    with contextlib.suppress(ConnectionResetError, BrokenPipeError):
        while chunk := sock.recv(1 << 16):
            received += chunk
    return received


# -- members ---------------------------------------------------------------------------------------------------------


def credentials(*, secret: bytes = SECRET, role: str = "worker", identity: Identity | None = None) -> Credentials:
    return Credentials(identity or Identity(), secret, role)


def visit(
    endpoint: Endpoint,
    purpose: str,
    *,
    mine: Credentials | None = None,
    local: bool = False,
    pin: bytes | None = None,
) -> Connection:
    """Dial the endpoint, in the way it listens."""
    address = endpoint.local_name if local else endpoint.address
    return dial(mine or credentials(), address, purpose, deadline=soon("dial"), tls=endpoint.tls, pin=pin)


def assert_serves(endpoint: Endpoint, *, local: bool = False) -> None:
    """A good visitor is let in and can be talked to."""
    purpose = f"room/{next(_numbers)}"
    mine = credentials()
    dialed = visit(endpoint, purpose, mine=mine, local=local, pin=endpoint.credentials.identity.fingerprint)
    accepted, visitor = endpoint.expect(purpose).wait(soon(), "the visitor")
    try:
        assert visitor.member == mine.identity.member
        assert visitor.fingerprint == mine.identity.fingerprint
        assert visitor.role == mine.role
        assert visitor.purpose == purpose
        dialed.send("ping", 1, [torch.arange(3)], deadline=soon())
        header, tensors = accepted.receive(deadline=soon())
        assert header.kind == "ping"
        assert tensors[0].tolist() == [0, 1, 2]
        accepted.send("pong", 2, deadline=soon())
        assert dialed.receive(deadline=soon())[0].read_body(int) == 2
    finally:
        dialed.close()
        accepted.close()


def num_welcomes() -> int:
    """Handshakes that are under way in this process."""
    return sum(thread.name == "paceline-welcome" for thread in threading.enumerate())


# -- tensors ---------------------------------------------------------------------------------------------------------


def some_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return (numbers % 2 == 0) if dtype == torch.bool else (numbers % 100).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


# -- forks -----------------------------------------------------------------------------------------------------------


def in_fork(work: Callable[[], Any]) -> Any:
    """What `work` returns (as JSON) in a forked child of this process."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(int(WAIT_S))
            try:
                answer = {"returned": work()}
            except BaseException as error:
                answer = {"raised": f"{type(error).__name__}: {error}"}
            os.write(writing, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        written = pipe.read()
    os.waitpid(child, 0)
    assert written, "the child died before it could answer"
    decoded = json.loads(written)
    assert "raised" not in decoded, decoded["raised"]
    return decoded["returned"]


def open_sockets_and_anonymous() -> dict[str, str]:
    """This process's descriptors that are sockets, memory, signals or process handles, and what they refer to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "anon_inode:[eventfd", "anon_inode:[pidfd", "pidfd:", "/memfd:")):
                found[name] = target
    return found
