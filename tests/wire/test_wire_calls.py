"""Calls return what handlers return, raise what they raise, and leave the connection good or closed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from paceline.errors import CallFailed, ConnectionLost, DeadlineExceeded, ProtocolError
from paceline.wire.calls import CallBody, Handler, call, serve
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.waiting import Wanted
from tests.wire.helpers import PAIRS, WAIT_S, connected, in_background, soon

BIG = 4 << 20


def add(request: CallBody) -> int:
    one, other = request.read(tuple[int, int])
    return int(one + other)


def fail(_: CallBody) -> None:
    raise KeyError("no such shard")


def lose_another(_: CallBody) -> None:
    raise ConnectionLost("the backup closed the connection")


def answer_with_a_tensor(_: CallBody) -> torch.Tensor:
    return torch.zeros(4)


def answer_big(_: CallBody) -> bytes:
    return bytes(BIG)


HANDLERS: dict[str, Handler] = {
    "add": add,
    "fail": fail,
    "lose_another": lose_another,
    "answer_with_a_tensor": answer_with_a_tensor,
    "answer_big": answer_big,
}


@contextlib.contextmanager
def served(kind: str = "unix") -> Iterator[tuple[Connection, Future[None]]]:
    with connected(kind) as (caller, callee):
        serving = in_background(lambda: serve(callee, HANDLERS, idle_s=WAIT_S, answer_s=WAIT_S))
        yield caller, serving
        caller.close()
        serving.result(WAIT_S)


def assert_still_good(connection: Connection) -> None:
    assert call(connection, "add", (2, 3), answer_type=int, deadline=soon()) == 5


@pytest.mark.parametrize("kind", PAIRS)
def test_a_call_returns_what_the_handler_returns(kind: str) -> None:
    with served(kind) as (connection, _):
        for _ in range(10):
            assert_still_good(connection)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("fail", "fail on bob: KeyError: 'no such shard'"),
        ("no_such", "there is no operation 'no_such' here"),
        ("add", "add: arguments that cannot be read"),
        ("lose_another", "ConnectionLost: the backup closed"),
        ("answer_with_a_tensor", "TypeError: .*Tensor"),
    ],
)
def test_what_a_handler_raises_reaches_the_caller_and_the_connection_stays_good(operation: str, message: str) -> None:
    with served() as (connection, _):
        with pytest.raises(CallFailed, match=message):
            call(connection, operation, "not two numbers", answer_type=int, deadline=soon())
        assert_still_good(connection)


def test_an_answer_of_another_type_is_a_protocol_error() -> None:
    with served() as (connection, _), pytest.raises(ProtocolError, match="not a str"):
        call(connection, "add", (2, 3), answer_type=str, deadline=soon())


def test_what_is_no_answer_is_a_protocol_error() -> None:
    with connected("unix") as (caller, callee):
        callee.send("call", None, deadline=soon())
        with pytest.raises(ProtocolError, match="bob answered add with 'call'"):
            call(caller, "add", (2, 3), answer_type=int, deadline=soon())


def test_a_callee_that_does_not_answer_is_named_with_the_operation() -> None:
    with connected("unix") as (caller, _), pytest.raises(DeadlineExceeded, match=r"pull of shard 4.*bob"):
        call(caller, "pull", answer_type=int, deadline=Deadline(0.05, "pull of shard 4"))


def test_serving_ends_when_nobody_calls_for_too_long() -> None:
    with connected("unix") as (_, callee), pytest.raises(DeadlineExceeded, match="serving alice"):
        serve(callee, HANDLERS, idle_s=0.05, answer_s=WAIT_S)


class DrainsThenGivesUp:
    """A wait that lasted too long, after which there is room to send again."""

    def __init__(self, reader: Connection) -> None:
        self.reader = reader
        self.drained = bytearray()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self.reader.fileno(), 1 << 20):
                self.drained += chunk

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        self.drain()
        raise deadline.error(waited_for)


def test_after_half_an_answer_nothing_more_is_sent_that_would_be_read_as_its_rest() -> None:
    with connected("unix") as (caller, callee):
        caller.send("call", ("answer_big", None), deadline=soon())
        waiter = DrainsThenGivesUp(caller)
        callee.waiter = waiter
        with pytest.raises(DeadlineExceeded, match="answering answer_big of alice"):
            serve(callee, HANDLERS, idle_s=WAIT_S, answer_s=WAIT_S)
        waiter.drain()
        assert 0 < len(waiter.drained) < BIG
        assert b"raise" not in waiter.drained
