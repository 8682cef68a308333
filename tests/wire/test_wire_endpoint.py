"""An endpoint serves its visitors whatever strangers do to it, keeps them for who expects them, and leaves
nothing."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from paceline.errors import AddressError, ConnectionLost, DeadlineExceeded, HandshakeRefused
from paceline.testing.eventually import eventually
from paceline.wire import endpoint as endpoint_module
from paceline.wire import frame
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.dialing import connect, dial
from paceline.wire.endpoint import Endpoint, Expectation
from paceline.wire.frame import MAGIC, PREFIX
from paceline.wire.handshake import Visitor
from paceline.wire.identity import Identity
from paceline.wire.waiting import PLAIN, is_ready
from tests.wire.helpers import (
    WAIT_S,
    assert_serves,
    connected,
    credentials,
    in_background,
    num_welcomes,
    read_to_end,
    soon,
    visit,
)


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with Endpoint(credentials(role="server"), tls=request.param) as endpoint:
        yield endpoint
        eventually(lambda: num_welcomes() == 0, "the last handshake ends")


# -- strangers -------------------------------------------------------------------------------------------------------


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def close_within_the_prefix(sock: socket.socket) -> None:
    sock.sendall(MAGIC)
    sock.shutdown(socket.SHUT_WR)


def sends(data: bytes) -> Callable[[socket.socket], None]:
    return lambda sock: sock.sendall(data)


RUDE: dict[str, Callable[[socket.socket], None]] = {
    "speaks HTTP": sends(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n"),
    "sends zeros": sends(bytes(4096)),
    "begins a broken TLS": sends(b"\x16\x03\x01\x00\x45\x01\x00\x00\x41\x03\x03" + bytes(63)),
    "announces a header of 4 GiB": sends(PREFIX.pack(MAGIC, 2**32 - 1, 0) + bytes(1024)),
    "announces a payload": sends(PREFIX.pack(MAGIC, 64, 2**40)),
    "sends text that is not UTF-8": sends(PREFIX.pack(MAGIC, 5, 0) + b"\x92\xa2\xff\xfe\xc0"),
    "sends a body that is not UTF-8": sends(
        PREFIX.pack(MAGIC, 26, 0) + b"\x92\xa5hello" + b"\x82\xa7version\x01\xa6member\xa1\xff"
    ),
    "nests too deep": sends(PREFIX.pack(MAGIC, 4096, 0) + b"\x93\xa1k" + b"\x91" * 4093),
    "skips the hello": sends(frame.encode("answer", None)),
    "closes at once": lambda sock: sock.shutdown(socket.SHUT_WR),
    "closes within the prefix": close_within_the_prefix,
    "resets": reset,
}
SILENT: dict[str, Callable[[socket.socket], None]] = {
    "says nothing": lambda sock: None,
    "stops within the prefix": sends(MAGIC),
    "stops within the header": sends(PREFIX.pack(MAGIC, 100, 0) + b"\x93"),
}


def visit_rudely(address: tuple[str, int] | str, behave: Callable[[socket.socket], None]) -> None:
    """Behaves like that, and returns once the endpoint has hung up."""
    if isinstance(address, str):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address}")
    else:
        sock = socket.create_connection(address, timeout=WAIT_S)
    with sock:
        behave(sock)
        if sock.fileno() >= 0:
            read_to_end(sock)


# Leave without a word: over the network that is no attack, but a look whether somebody is there.
SPEECHLESS = ["closes at once", "resets"]


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "paceline.wire"]


def assert_refused_once(
    endpoint: Endpoint, address: tuple[str, int] | str, caplog: pytest.LogCaptureFixture, stranger: Callable[[], None]
) -> None:
    for _ in range(3):
        stranger()
    eventually(lambda: bool(refusals(caplog)), "the refusal in the log")
    eventually(lambda: num_welcomes() == 0, "the handshakes end")
    assert len(refusals(caplog)) == 1, refusals(caplog)
    assert "127.0.0.1:" in refusals(caplog)[0] or isinstance(address, str)
    assert_serves(endpoint)


@pytest.mark.parametrize("behaviour", [behaviour for behaviour in RUDE if behaviour not in SPEECHLESS])
def test_strangers_are_refused_logged_once_and_the_next_visitor_is_served(
    behaviour: str, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = lambda: visit_rudely(endpoint.address, RUDE[behaviour])  # noqa: E731
    assert_refused_once(endpoint, endpoint.address, caplog, stranger)


@pytest.mark.parametrize("behaviour", SPEECHLESS)
def test_who_only_looks_whether_somebody_listens_is_not_logged(
    behaviour: str, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Members find out in this way whom they can reach."""
    for _ in range(3):
        visit_rudely(endpoint.address, RUDE[behaviour])
    eventually(lambda: num_welcomes() == 0, "the handshakes end")
    assert_serves(endpoint)
    assert refusals(caplog) == []


@pytest.mark.parametrize("behaviour", SILENT)
def test_strangers_that_stall_are_refused_within_the_deadline(
    behaviour: str, endpoint: Endpoint, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 0.2)

    def stranger() -> None:
        begun = time.monotonic()
        visit_rudely(endpoint.address, SILENT[behaviour])
        assert time.monotonic() - begun < WAIT_S / 2
        monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 0.05)

    for _ in range(3):
        stranger()
    eventually(lambda: bool(refusals(caplog)), "the refusal in the log")
    eventually(lambda: num_welcomes() == 0, "the handshakes end")
    assert len(refusals(caplog)) == 1, refusals(caplog)
    assert "waited 0.2 s" in refusals(caplog)[0] or "does not speak our TLS" in refusals(caplog)[0]
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", WAIT_S)
    assert_serves(endpoint)


@pytest.mark.parametrize("behaviour", ["speaks HTTP", "closes at once", "announces a header of 4 GiB"])
def test_strangers_of_this_host_are_refused_too(
    behaviour: str, endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = lambda: visit_rudely(endpoint.local_name, RUDE[behaviour])  # noqa: E731
    assert_refused_once(endpoint, endpoint.local_name, caplog, stranger)
    assert_serves(endpoint, local=True)


def test_each_kind_of_refusal_is_logged(endpoint: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    endpoint._log_refusal("10.0.0.1:5", HandshakeRefused("no"))
    endpoint._log_refusal("10.0.0.1:6", HandshakeRefused("no"))
    endpoint._log_refusal("10.0.0.1:7", DeadlineExceeded("late"))
    endpoint._log_refusal("10.0.0.2:5", HandshakeRefused("no"))
    assert [message.split()[1] for message in refusals(caplog)] == ["10.0.0.1:5:", "10.0.0.1:7:", "10.0.0.2:5:"]


def test_announcing_a_header_of_4_gib_takes_no_memory() -> None:
    with Endpoint(credentials()) as endpoint:
        assert_serves(endpoint)
        tracemalloc.start()
        try:
            for _ in range(10):
                visit_rudely(endpoint.address, RUDE["announces a header of 4 GiB"])
            eventually(lambda: num_welcomes() == 0, "the handshakes end")
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


def test_a_tls_client_at_a_plain_endpoint_is_told_about_tls() -> None:
    with Endpoint(credentials()) as endpoint:
        with pytest.raises(HandshakeRefused, match="is TLS on at both sides"):
            dial(credentials(), endpoint.address, "room/x", deadline=soon(), tls=True, pin=None)
        assert_serves(endpoint)


def test_a_plain_client_at_a_tls_endpoint_is_told_about_tls() -> None:
    with Endpoint(credentials(), tls=True) as endpoint:
        with pytest.raises(HandshakeRefused, match="TLS setting"):
            dial(credentials(), endpoint.address, "room/x", deadline=soon(), tls=False, pin=None)
        assert_serves(endpoint)


def test_old_versions_of_tls_are_refused() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with Endpoint(credentials(), tls=True) as endpoint:
        with (
            socket.create_connection(endpoint.address, timeout=WAIT_S) as sock,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            context.wrap_socket(sock)
        assert_serves(endpoint)


def test_good_visitors_are_served_while_strangers_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HANDSHAKE_S", 1.0)
    with Endpoint(credentials()) as endpoint, contextlib.ExitStack() as strangers:
        for _ in range(30):
            strangers.enter_context(socket.create_connection(endpoint.address, timeout=WAIT_S))
        assert_serves(endpoint)
        eventually(lambda: num_welcomes() == 0, "the strangers are given up")


# -- addresses -------------------------------------------------------------------------------------------------------


def test_a_port_in_use_says_so_and_what_to_do() -> None:
    with Endpoint(credentials()) as endpoint, pytest.raises(AddressError, match=r"in use; choose a free port"):
        Endpoint(credentials(), port=endpoint.address[1])


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    with pytest.raises(AddressError, match="an address of this machine"):
        Endpoint(credentials(), host="192.0.2.1")


def test_an_unknown_host_says_so_and_what_to_do() -> None:
    with pytest.raises(AddressError, match=r"'no-such-host.invalid' does not resolve.*check its spelling"):
        dial(credentials(), ("no-such-host.invalid", 1), "room/x", deadline=soon(), tls=False, pin=None)
    with pytest.raises(AddressError, match="check its spelling"):
        Endpoint(credentials(), host="no-such-host.invalid")
    with pytest.raises(AddressError, match="check its spelling"):
        dial(credentials(), ("a" * 100 + ".invalid", 1), "room/x", deadline=soon(), tls=False, pin=None)


def test_nobody_there_says_so_and_what_to_do() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # not listening
        with pytest.raises(AddressError, match=r"127.0.0.1:\d+: Connection refused; is the other side still running"):
            dial(credentials(), bound.getsockname(), "room/x", deadline=soon(), tls=False, pin=None)


def test_no_process_of_that_name_on_this_host_says_so() -> None:
    with pytest.raises(AddressError, match="cannot reach a process of this host"):
        dial(credentials(), "paceline-nobody", "room/x", deadline=soon(), tls=False, pin=None)


def test_a_listener_that_never_answers_ends_with_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for tls in (False, True):
            deadline = Deadline(0.1, "joining")
            with pytest.raises(DeadlineExceeded, match="joining"):
                dial(credentials(), silent.getsockname(), "room/x", deadline=deadline, tls=tls, pin=None)


@contextlib.contextmanager
def full_backlog() -> Iterator[tuple[socket.socket, str]]:
    """A Unix socket whose queue of visitors is full."""
    name = f"paceline-test-{os.urandom(8).hex()}"
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as waiting:
        listener.bind(f"\0{name}")
        listener.listen(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = waiting.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(f"\0{name}")
        yield listener, name


def test_a_full_backlog_on_this_host_is_waited_for() -> None:
    with full_backlog() as (listener, name):
        connecting = in_background(lambda: connect(name, soon(), PLAIN))
        with contextlib.suppress(TimeoutError):
            connecting.result(0.1)
        assert not connecting.done(), "it must wait for room in the queue"
        listener.accept()[0].close()
        connection = connecting.result(WAIT_S)
        assert connection.socket.getblocking() is False
        connection.close()


def test_a_backlog_that_stays_full_ends_with_the_deadline() -> None:
    with full_backlog() as (_, name), pytest.raises(DeadlineExceeded, match=r"joining.*a process of this host"):
        connect(name, Deadline(0.1, "joining"), PLAIN)


# -- rooms -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def parked(endpoint: Endpoint, purpose: str) -> Iterator[Connection]:
    connection = visit(endpoint, purpose)
    try:
        eventually(lambda: purpose in endpoint._parked, "the visitor is parked")
        yield connection
    finally:
        connection.close()


def assert_hung_up(connection: Connection) -> None:
    with pytest.raises(ConnectionLost):
        connection.receive(deadline=soon())


def test_an_expectation_before_and_after_the_arrival(endpoint: Endpoint) -> None:
    early = endpoint.expect("room/early")
    with pytest.raises(DeadlineExceeded, match=r"forming: waited 0.05 s for rank 2"):
        early.wait(Deadline(0.05, "forming"), "rank 2")
    with visit(endpoint, "room/early").socket, parked(endpoint, "room/late"):
        for expectation, purpose in [(early, "room/early"), (endpoint.expect("room/late"), "room/late")]:
            connection, visitor = expectation.wait(soon(), "the visitor")
            assert visitor.purpose == purpose
            assert connection.peer == f"worker {visitor.member}"
            connection.close()
    assert not endpoint._parked
    assert not endpoint._expected


def test_the_signal_of_an_arrival_is_not_closed_while_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who begins to wait between the visit and its signal must wait for the signal too."""
    expectation = Expectation("room/x")
    write = os.eventfd_write
    taken: list[Visitor] = []

    def waiter_comes_first(descriptor: int, value: int) -> None:
        waiting = in_background(lambda: taken.append(expectation.wait(soon(), "the visitor")[1]))
        with contextlib.suppress(TimeoutError):
            waiting.result(0.1)
        assert not waiting.done(), "the waiter closed the descriptor that is about to be written to"
        write(descriptor, value)

    with connected("unix") as (connection, _):
        monkeypatch.setattr(os, "eventfd_write", waiter_comes_first)
        expectation.deliver(connection, Visitor("m", "worker", b"", "room/x"))
        eventually(lambda: bool(taken), "the visitor is taken")


def test_closing_a_room_hangs_up_on_its_visitors_only(endpoint: Endpoint) -> None:
    endpoint.open_room("one")
    endpoint.open_room("two")
    assert endpoint.num_rooms() == 2
    with parked(endpoint, "one/a") as first, parked(endpoint, "one/b/c") as second, parked(endpoint, "two/a") as other:
        endpoint.close_room("one")
        assert_hung_up(first)
        assert_hung_up(second)
        assert list(endpoint._parked) == ["two/a"]
        with pytest.raises(DeadlineExceeded):
            other.receive(deadline=Deadline(0.05, "nothing"))
    assert endpoint.num_rooms() == 1
    endpoint.close_room("two")


def test_closing_the_endpoint_hangs_up_on_who_is_parked_but_not_on_who_was_handed_out() -> None:
    endpoint = Endpoint(credentials())
    with parked(endpoint, "room/a") as waiting, visit(endpoint, "room/b").socket as handed_out:
        connection, _ = endpoint.expect("room/b").wait(soon(), "the visitor")
        endpoint.close()
        endpoint.close()
        assert_hung_up(waiting)
        connection.send("still here", None, deadline=soon())
        assert handed_out.fileno() >= 0
        eventually(lambda: len(_peek(handed_out)) > 0, "the frame arrives")
        connection.close()
    with pytest.raises(AddressError):
        dial(credentials(), endpoint.address, "room/x", deadline=soon(), tls=False, pin=None)
    with pytest.raises(AddressError):
        dial(credentials(), endpoint.local_name, "room/x", deadline=soon(), tls=False, pin=None)


def _peek(sock: socket.socket) -> bytes:
    try:
        return sock.recv(16, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


class ClosesTheEndpointWhileSigning(Identity):
    endpoint: Endpoint

    def sign(self, message: bytes) -> bytes:
        self.endpoint.close()
        return super().sign(message)


def test_who_is_in_its_handshake_when_the_endpoint_closes_is_hung_up_on() -> None:
    late = ClosesTheEndpointWhileSigning()
    with Endpoint(credentials()) as endpoint:
        late.endpoint = endpoint
        with visit(endpoint, "room/late", mine=credentials(identity=late)).socket as sock:
            sock.settimeout(WAIT_S)
            assert sock.recv(1) == b""


def test_visitors_of_a_room_that_never_opens_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "PARKING_S", 0.2)
    with Endpoint(credentials()) as endpoint:
        endpoint.open_room("open")
        with parked(endpoint, "open/a") as kept, visit(endpoint, "unknown/a").socket as dropped:
            dropped.settimeout(WAIT_S)
            assert dropped.recv(1) == b"", "dropped although no other visitor came"
            assert list(endpoint._parked) == ["open/a"]
            with pytest.raises(DeadlineExceeded):
                kept.receive(deadline=Deadline(0.05, "nothing"))


def test_a_second_visitor_takes_the_place_of_the_first_for_the_same_purpose(endpoint: Endpoint) -> None:
    """Who comes again has given up its first try; the older connection may be as dead as that."""
    with parked(endpoint, "room/a") as first:
        second = visit(endpoint, "room/a")
        assert_hung_up(first)
        connection, _ = endpoint.expect("room/a").wait(soon(), "the second")
        second.send("hi", None, deadline=soon())
        assert connection.receive(deadline=soon())[0].kind == "hi"
        connection.close()
        second.close()


def test_a_parked_visitor_that_has_left_is_not_handed_out(endpoint: Endpoint) -> None:
    with parked(endpoint, "room/a") as first:
        first.close()
        eventually(lambda: is_ready(endpoint._parked["room/a"][1].fileno(), select.POLLRDHUP), "its end is seen")
        expectation = endpoint.expect("room/a")
        assert not expectation.is_there()
        second = visit(endpoint, "room/a")
        connection, _ = expectation.wait(soon(), "the second")
        connection.close()
        second.close()


def test_more_visitors_than_can_be_parked_are_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_PARKED", 2)
    with Endpoint(credentials()) as endpoint, parked(endpoint, "room/a"), parked(endpoint, "room/b"):
        third = visit(endpoint, "room/c")
        assert_hung_up(third)
        third.close()


def test_a_room_with_a_handler_gets_each_visitor_on_a_thread_of_its_own(endpoint: Endpoint) -> None:
    threads: set[int] = set()
    together = threading.Barrier(3, timeout=WAIT_S)

    def handle(connection: Connection, visitor: Visitor) -> None:
        threads.add(threading.get_ident())
        together.wait()
        connection.send("seen", visitor.purpose, deadline=soon())
        connection.close()

    endpoint.open_room("meeting", handle)
    visitors = [visit(endpoint, "meeting") for _ in range(3)]
    for connection in visitors:
        assert connection.receive(deadline=soon())[0].read_body(str) == "meeting"
        connection.close()
    assert len(threads) == 3


def test_nothing_listens_beyond_loopback_unless_asked() -> None:
    with Endpoint(credentials()) as endpoint:
        assert endpoint.address[0] == "127.0.0.1"
