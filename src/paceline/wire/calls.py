"""Request and response, and streams of items, on a connection.

    caller   -> callee   "call"    operation and arguments, with tensors
    callee   -> caller   "item"    any number of times, for an operation that yields
    callee   -> caller   "return"  the result, or "raise" with the error's text

One call at a time on a connection. A handler is a plain function `(body, tensors) -> Reply`, or a generator of
`Reply` for a stream; it runs on the thread that called `serve`. What it raises reaches the caller as `CallFailed`,
and the connection stays good; only a broken connection ends `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paceline.errors import CallFailed, ConnectionLost, ProtocolError
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.decoding import decode
from paceline.wire.frame import UNREADABLE, Header

if TYPE_CHECKING:
    import torch


class Reply(NamedTuple):
    body: Any = None
    tensors: Sequence[torch.Tensor] = ()


class CallBody(msgspec.Struct, frozen=True, array_like=True):
    operation: str
    arguments: msgspec.Raw

    def read(self, arguments_type: type[Any]) -> Any:
        try:
            return decode(self.arguments, arguments_type)
        except UNREADABLE as error:
            raise ProtocolError(f"{self.operation}: arguments that cannot be read: {error}") from error


Handler = Callable[[CallBody, "list[torch.Tensor]"], "Reply | Iterator[Reply]"]


def call(
    connection: Connection,
    operation: str,
    arguments: Any = None,
    tensors: Sequence[torch.Tensor] = (),
    *,
    deadline: Deadline,
    into: Sequence[torch.Tensor] | None = None,
) -> tuple[Header, list[torch.Tensor]]:
    """Ask for one result. With `into`, its tensors are received straight into those."""
    _send_call(connection, operation, arguments, tensors, deadline)
    # An error comes without tensors: what the caller gave as their destination counts for a result only.
    header, received = connection.receive(deadline=deadline, into=into, into_kind="return")
    if header.kind != "return":
        _raise_unless_item(connection, operation, header, "return")
    return header, received


def stream(
    connection: Connection,
    operation: str,
    arguments: Any = None,
    tensors: Sequence[torch.Tensor] = (),
    *,
    deadline: Deadline,
) -> Iterator[tuple[Header, list[torch.Tensor]]]:
    """Ask for many results, one at a time as they come. Leaving the loop early closes the connection."""
    _send_call(connection, operation, arguments, tensors, deadline)
    complete = False
    try:
        while True:
            header, received = connection.receive(deadline=deadline)
            if header.kind == "return":
                complete = True
                return
            if header.kind != "item":
                complete = header.kind == "raise"
                _raise_unless_item(connection, operation, header, "item")
            yield header, received
    finally:
        if not complete:
            connection.close()  # what is still under way belongs to nobody


def serve(connection: Connection, handlers: Mapping[str, Handler], *, idle_s: float, answer_s: float) -> None:
    """Answer calls until the caller closes. Each wait for a call lasts at most `idle_s`, each answer `answer_s`."""
    while True:
        try:
            header, tensors = connection.receive(deadline=Deadline(idle_s, f"serving {connection.peer}"))
        except ConnectionLost:
            return
        if header.kind != "call":
            raise ProtocolError(f"{connection.peer} sent {header.kind!r} where a call was expected")
        request = header.read_body(CallBody)
        deadline = Deadline(answer_s, f"answering {request.operation} of {connection.peer}")
        try:
            for kind, reply in _answers(handlers, request, tensors):
                connection.send(kind, reply.body, reply.tensors, deadline=deadline)
        except ConnectionLost:
            return
        except (TypeError, ValueError, OverflowError) as error:  # a reply that cannot be sent; nothing of it was
            connection.send("raise", f"{type(error).__name__}: {error}", deadline=deadline)


def _answers(
    handlers: Mapping[str, Handler], request: CallBody, tensors: list[torch.Tensor]
) -> Iterator[tuple[str, Reply]]:
    """What there is to send. What the handler raises is the last of it; an error of the sending is not, because a
    "raise" after half a frame would be read as the rest of that frame."""
    try:
        handler = handlers.get(request.operation)
        if handler is None:
            raise ProtocolError(f"there is no operation {request.operation!r} here")
        result = handler(request, tensors)
        if not isinstance(result, Reply):
            for item in result:
                yield "item", item
            result = Reply()
    except Exception as error:
        yield "raise", Reply(f"{type(error).__name__}: {error}")
        return
    yield "return", result


def _send_call(
    connection: Connection,
    operation: str,
    arguments: Any,
    tensors: Sequence[torch.Tensor],
    deadline: Deadline,
) -> None:
    request = CallBody(operation, msgspec.Raw(msgspec.msgpack.encode(arguments)))
    connection.send("call", request, tensors, deadline=deadline)


def _raise_unless_item(connection: Connection, operation: str, header: Header, wanted: str) -> None:
    if header.kind == "raise":
        raise CallFailed(f"{operation} on {connection.peer}: {header.read_body(str)}")
    raise ProtocolError(f"{connection.peer} answered {operation} with {header.kind!r} where {wanted!r} was expected")
