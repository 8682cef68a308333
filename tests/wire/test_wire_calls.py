"""Calls return what handlers return, raise what they raise, and leave the connection good or closed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from paceline.errors import CallFailed, ConnectionLost, DeadlineExceeded, ProtocolError
from paceline.wire.calls import CallBody, Handler, Reply, call, serve, stream
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.waiting import Wanted
from tests.wire.helpers import PAIRS, WAIT_S, connected, in_background, soon

BIG = 4 << 20


def add(request: CallBody, _: list[torch.Tensor]) -> Reply:
    one, other = request.read(tuple[int, int])
    return Reply(one + other)


def double(_: CallBody, tensors: list[torch.Tensor]) -> Reply:
    return Reply(None, [tensor * 2 for tensor in tensors])


def count(request: CallBody, _: list[torch.Tensor]) -> Iterator[Reply]:
    for number in range(request.read(int)):
        yield Reply(number, [torch.full((2,), number)])


def fail(_: CallBody, __: list[torch.Tensor]) -> Reply:
    raise KeyError("no such shard")


def fail_late(_: CallBody, __: list[torch.Tensor]) -> Iterator[Reply]:
    yield Reply(1)
    raise RuntimeError("the disk is full")


def lose_another(_: CallBody, __: list[torch.Tensor]) -> Reply:
    raise ConnectionLost("the backup closed the connection")


def answer_with_a_view(_: CallBody, __: list[torch.Tensor]) -> Reply:
    return Reply(None, [torch.zeros(4, 4).t()])


def yield_a_view(_: CallBody, __: list[torch.Tensor]) -> Iterator[Reply]:
    yield Reply(None, [torch.zeros(4, 4).t()])


def yield_big(_: CallBody, __: list[torch.Tensor]) -> Iterator[Reply]:
    yield Reply(None, [torch.zeros(BIG)])


HANDLERS: dict[str, Handler] = {
    "add": add,
    "double": double,
    "count": count,
    "fail": fail,
    "fail_late": fail_late,
    "lose_another": lose_another,
    "answer_with_a_view": answer_with_a_view,
    "yield_a_view": yield_a_view,
    "yield_big": yield_big,
}


@contextlib.contextmanager
def served(kind: str = "unix") -> Iterator[tuple[Connection, Future[None]]]:
    with connected(kind) as (caller, callee):
        serving = in_background(lambda: serve(callee, HANDLERS, idle_s=WAIT_S, answer_s=WAIT_S))
        yield caller, serving
        caller.close()
        serving.result(WAIT_S)


def assert_still_good(connection: Connection) -> None:
    assert call(connection, "add", (2, 3), deadline=soon())[0].read_body(int) == 5


@pytest.mark.parametrize("kind", PAIRS)
def test_a_call_returns_what_the_handler_returns(kind: str) -> None:
    with served(kind) as (connection, _):
        for _ in range(10):
            assert_still_good(connection)
        header, received = call(connection, "double", None, [torch.arange(5), torch.ones(0)], deadline=soon())
        assert header.kind == "return"
        assert [tensor.tolist() for tensor in received] == [[0, 2, 4, 6, 8], []]


def test_results_go_straight_into_the_tensors_given() -> None:
    into = torch.zeros(5, dtype=torch.int64)
    with served() as (connection, _):
        _, (received,) = call(connection, "double", None, [torch.arange(5)], deadline=soon(), into=[into])
    assert received.data_ptr() == into.data_ptr()
    assert into.tolist() == [0, 2, 4, 6, 8]


@pytest.mark.parametrize("kind", PAIRS)
def test_a_stream_gives_items_in_order_and_the_connection_stays_good(kind: str) -> None:
    with served(kind) as (connection, _):
        for num_items in (0, 1, 100):
            items = list(stream(connection, "count", num_items, deadline=soon()))
            assert [header.read_body(int) for header, _ in items] == list(range(num_items))
            assert all(tensors[0].tolist() == [n, n] for n, (_, tensors) in enumerate(items))
        assert_still_good(connection)


@pytest.mark.parametrize("into", [None, [torch.zeros(3)]], ids=["new tensors", "into given tensors"])
@pytest.mark.parametrize(
    ("operation", "message"),
    [
        ("fail", "fail on bob: KeyError: 'no such shard'"),
        ("no_such", "there is no operation 'no_such' here"),
        ("add", "add: arguments that cannot be read"),
        ("lose_another", "ConnectionLost: the backup closed"),
        ("answer_with_a_view", "TypeError: only contiguous CPU tensors"),
    ],
)
def test_what_a_handler_raises_reaches_the_caller_and_the_connection_stays_good(
    operation: str, message: str, into: list[torch.Tensor] | None
) -> None:
    with served() as (connection, _):
        with pytest.raises(CallFailed, match=message):
            call(connection, operation, "not two numbers", deadline=soon(), into=into)
        assert_still_good(connection)


@pytest.mark.parametrize(
    ("operation", "num_items", "message"),
    [
        ("fail_late", 1, "RuntimeError: the disk is full"),
        ("fail", 0, "no such shard"),
        ("yield_a_view", 0, "TypeError: only contiguous"),
    ],
)
def test_a_stream_that_fails_gives_what_came_before_and_the_connection_stays_good(
    operation: str, num_items: int, message: str
) -> None:
    with served() as (connection, _):
        received: list[object] = []
        with pytest.raises(CallFailed, match=message):
            received.extend(stream(connection, operation, deadline=soon()))
        assert len(received) <= num_items
        assert_still_good(connection)


def test_leaving_a_stream_early_closes_the_connection_and_ends_the_serving() -> None:
    with served() as (connection, serving):
        items = stream(connection, "count", 1_000_000, deadline=soon())
        assert next(items)[0].read_body(int) == 0
        items.close()  # type: ignore[attr-defined]
        assert connection.closed
        serving.result(WAIT_S)
        with pytest.raises(ConnectionLost, match="bob"):
            call(connection, "add", (1, 2), deadline=soon())


def test_a_wrong_destination_for_a_result_is_a_protocol_error() -> None:
    with served() as (connection, _), pytest.raises(ProtocolError, match=r"int64\[5\] where float32\[3\]"):
        call(connection, "double", None, [torch.arange(5)], deadline=soon(), into=[torch.zeros(3)])


def test_an_item_where_a_result_was_expected_is_a_protocol_error() -> None:
    with served() as (connection, _), pytest.raises(ProtocolError, match="'item' where 'return' was expected"):
        call(connection, "count", 3, deadline=soon())


def test_a_callee_that_does_not_answer_is_named_with_the_operation() -> None:
    with connected("unix") as (caller, _), pytest.raises(DeadlineExceeded, match=r"pull of shard 4.*bob"):
        call(caller, "pull", deadline=Deadline(0.05, "pull of shard 4"))


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


def test_after_half_an_item_nothing_more_is_sent_that_would_be_read_as_its_rest() -> None:
    with connected("unix") as (caller, callee):
        caller.send("call", ("yield_big", None), deadline=soon())
        waiter = DrainsThenGivesUp(caller)
        callee.waiter = waiter
        with pytest.raises(DeadlineExceeded, match="answering yield_big of alice"):
            serve(callee, HANDLERS, idle_s=WAIT_S, answer_s=WAIT_S)
        waiter.drain()
        assert 0 < len(waiter.drained) < BIG
        assert b"raise" not in waiter.drained
