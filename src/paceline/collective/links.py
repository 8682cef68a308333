"""The path through sockets: a stream between each two members, made when it is first needed.

`Traffic` is one operation's use of the links. What is posted goes out while the operation waits for what comes in, on
the same thread: an algorithm posts as soon as it has something and fills as soon as it needs something, and the
overlap follows by itself.

Each operation opens each link it uses, in each direction, with a frame that holds its number, its signature and how
many bytes will follow; the reader compares that with its own before it takes a byte.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from paceline.collective.base import Operation
from paceline.collective.health import Health
from paceline.collective.signature import Numbered
from paceline.errors import ConnectionLost
from paceline.wire import frame
from paceline.wire.connection import Connection, drop_sent
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Expectation


class Connect(Protocol):
    """Makes a further connection to a member: `dials` on one side, expects on the other. Raises what ends the
    group."""

    def __call__(self, rank: int, kind: str, deadline: Deadline, *, dials: bool) -> Connection: ...


class Connector(Protocol):
    """The same, and for who waits for several members at once: an expectation, and the connection of who came."""

    def connect(self, rank: int, kind: str, deadline: Deadline, *, dials: bool) -> Connection: ...

    def expect(self, rank: int, kind: str, *, keeps_ended: bool = False) -> Expectation: ...

    def welcome(self, rank: int, expectation: Expectation) -> Connection: ...


class Links:
    """`order` puts members of one host side by side, so that a ring crosses between two hosts only once in each
    direction."""

    def __init__(self, health: Health, connect: Connect) -> None:
        self.health = health
        self.order = ring_order([card.host for card in health.cards])
        self.position = self.order.index(health.rank)
        self._connect = connect
        self._connections: dict[int, Connection] = {}
        self._lock = threading.Lock()

    def to(self, rank: int, deadline: Deadline) -> Connection:
        connection = self._connections.get(rank)
        if connection is None:
            connection = self._connect(rank, "link", deadline, dials=rank < self.health.rank)
            with self._lock:
                self._connections[rank] = connection
        return connection

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()


def ring_order(hosts: list[str]) -> list[int]:
    """Ranks in an order that keeps hosts together, hosts by the first rank on each."""
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        first.setdefault(host, rank)
    return sorted(range(len(hosts)), key=lambda rank: (first[hosts[rank]], rank))


class Traffic:
    """One operation on the links; `flush` before the posted memory is changed, and at the end."""

    def __init__(self, links: Links, operation: Operation) -> None:
        self._links = links
        self._health = links.health
        self._operation = operation
        self._queues: dict[int, deque[memoryview]] = {}
        self._connections: dict[int, Connection] = {}

    def send_to(self, rank: int, num_bytes: int) -> None:
        """Announce that `num_bytes` will be posted to `rank`."""
        self._connections[rank] = self._links.to(rank, self._operation.deadline)
        opening = frame.encode(
            "operation", Numbered(self._operation.number, self._operation.signature), payload_bytes=num_bytes
        )
        self.post(rank, memoryview(opening))

    def receive_from(self, rank: int, num_bytes: int) -> None:
        """Read the announcement of `rank` and compare it with what this member expects."""
        self._connections[rank] = self._links.to(rank, self._operation.deadline)
        prefix = bytearray(frame.PREFIX.size)
        self.fill(rank, memoryview(prefix))
        limits = frame.Limits()
        header_bytes, payload_bytes = frame.decode_prefix(prefix, limits)
        header = bytearray(header_bytes)
        self.fill(rank, memoryview(header))
        theirs = frame.decode_header(header, payload_bytes, limits).read_body(Numbered)
        mine = self._operation
        if theirs.signature != mine.signature or theirs.number != mine.number:
            self._health.differ(rank, theirs.signature, mine.signature, mine.number, theirs.number)
        elif payload_bytes != num_bytes:
            self._health.fail(
                "mismatch",
                f"{mine.signature.operation}: {self._health.describe(rank)} sends {payload_bytes} bytes to "
                f"{self._health.describe(self._health.rank)}, which expects {num_bytes}",
                rank,
            )
        else:
            return
        raise self._health.error(mine.deadline.operation)

    def post(self, rank: int, data: memoryview) -> None:
        """Send after all that was posted to `rank` before; returns at once. The memory must stay as it is until
        `flush`."""
        if len(data):
            self._queues.setdefault(rank, deque()).append(data)
            self._push(rank)

    def fill(self, rank: int, into: memoryview) -> None:
        """Receive from `rank` until `into` is full, sending meanwhile."""
        connection = self._connections[rank]
        while len(into):
            try:
                count = connection.receive_some(into)
            except ConnectionLost as error:
                raise self._broke(rank, error) from error
            into = into[count:]
            # Sending is tried only where receiving would wait: a try in vain is dear, above all with TLS.
            if len(into) and not count and not self._push_all():
                self._wait([(connection.fileno(), connection.receive_events)], rank)

    def flush(self) -> None:
        """Wait until all that was posted is on its way."""
        while self._queues:
            if not self._push_all() and self._queues:
                self._wait([], next(iter(self._queues)))

    def _push_all(self) -> int:
        return sum(self._push(rank) for rank in list(self._queues))

    def _push(self, rank: int) -> int:
        queue = self._queues[rank]
        try:
            count = self._connections[rank].send_some(list(queue))
        except ConnectionLost as error:
            raise self._broke(rank, error) from error
        drop_sent(queue, count)
        if not queue:
            del self._queues[rank]
        return count

    def _wait(self, wanted: list[tuple[int, int]], rank: int) -> None:
        for sending in self._queues:
            connection = self._connections[sending]
            wanted.append((connection.fileno(), connection.send_events))
        merged: dict[int, int] = {}
        for descriptor, events in wanted:
            merged[descriptor] = merged.get(descriptor, 0) | events
        self._health.wait_any(list(merged.items()), self._operation.deadline, self._health.describe(rank))

    def _broke(self, rank: int, error: ConnectionLost) -> Exception:
        return self._health.gone(rank, f"was lost ({error})", self._operation.deadline.operation)
