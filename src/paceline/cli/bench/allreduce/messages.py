"""What the bench and its workers say to each other: one JSON object a line, over a Unix stream socket."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec


class FormOrder(msgspec.Struct, tag="form", frozen=True):
    """To a worker: join the others. `rendezvous` is how its library finds them; it may be a secret."""

    rendezvous: str
    num_ranks: int
    num_threads: int


class MeasureOrder(msgspec.Struct, tag="measure", frozen=True):
    num_elements: int
    num_warmups: int
    num_iterations: int
    algorithm: str
    tensors: str


class StopOrder(msgspec.Struct, tag="stop", frozen=True):
    """To a worker: leave the group and end."""


class RankReady(msgspec.Struct, tag="ready", frozen=True):
    """From a worker that joined, with what its library says of itself."""

    rank: int
    num_ranks: int
    version: str


class RankTimes(msgspec.Struct, tag="measured", frozen=True):
    """When this rank went into and came out of each operation, on the clock that all processes share."""

    entered_ns: list[int]
    left_ns: list[int]


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    message: str


Order = FormOrder | MeasureOrder | StopOrder
Reply = RankReady | RankTimes | RankFailed

Incoming = TypeVar("Incoming")


class Channel(Generic[Incoming]):
    """One end of the line between the bench and a worker."""

    def __init__(self, connection: socket.socket, decode: Callable[[bytearray], Incoming]) -> None:
        self._connection = connection
        self._decode = decode
        self._received = bytearray()

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Order | Reply) -> None:
        self._connection.sendall(msgspec.json.encode(message) + b"\n")

    def receive(self) -> Incoming:
        """Blocks, without spinning, until a whole message is there. EOFError when the other side is gone."""
        while (message := self.pump()) is None:
            pass
        return message

    def pump(self) -> Incoming | None:
        """Takes in what has arrived, or waits as long as the socket does; a message once it is whole."""
        chunk = self._connection.recv(1 << 16)
        if not chunk:
            raise EOFError
        self._received += chunk
        line, newline, rest = self._received.partition(b"\n")
        if not newline:
            return None
        self._received = rest
        return self._decode(line)

    def close(self) -> None:
        self._connection.close()


def to_worker(connection: socket.socket) -> Channel[Reply]:
    """The bench's end."""
    return Channel(connection, msgspec.json.Decoder(Reply).decode)


def to_bench(connection: socket.socket) -> Channel[Order]:
    """The worker's end."""
    return Channel(connection, msgspec.json.Decoder(Order).decode)
