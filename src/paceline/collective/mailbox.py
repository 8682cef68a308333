"""Messages between two members: send and receive, with tags, beside the group's operations and in no order with them.

Each pair has a connection a direction, made by the sender when it first sends. Messages of one sender arrive in the
order sent; one with a tag that nobody has asked for yet is put aside, up to `MAX_ASIDE_BYTES`. Within a host, large
ones go through memory (`conveyor`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from paceline.collective import conveyor
from paceline.collective.conveyor import Carried, Conveyor
from paceline.collective.health import Health
from paceline.collective.links import Connect
from paceline.errors import ConnectionLost, GroupError
from paceline.wire.connection import Connection, describe
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import DTYPES, spec_of
from paceline.wire.frame import Header, TensorSpec, check_spec

MAX_ASIDE_BYTES = 1 << 28


class _Inbox:
    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.aside: dict[int, deque[torch.Tensor]] = {}
        self.num_aside_bytes = 0


class Mailbox:
    """Called for each peer and direction by one thread at a time; `Messages` sees to that."""

    def __init__(self, health: Health, connect: Connect, conveyor: Conveyor) -> None:
        self._health = health
        self._connect = connect
        self._conveyor = conveyor
        self._outboxes: dict[int, Connection] = {}
        self._inboxes: dict[int, _Inbox] = {}

    def send(self, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> None:
        if rank not in self._outboxes:
            self._outboxes[rank] = self._connect(rank, "mail", deadline, dials=True)
        connection = self._outboxes[rank]
        try:
            if not self._conveyor.send(connection, tensor, rank, tag, deadline):
                connection.send("message", tag, [tensor], deadline=deadline)
        except ConnectionLost as error:
            raise self._health.gone(rank, f"was lost ({error})", deadline.operation) from error

    def receive(self, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> None:
        inbox = self._inboxes.setdefault(rank, _Inbox())
        if self._take_aside(inbox, tensor, rank, tag, deadline):
            return
        try:
            while not self._read_one(inbox, tensor, rank, tag, deadline):
                pass
        except ConnectionLost as error:
            raise self._health.gone(rank, f"was lost ({error})", deadline.operation) from error

    def _take_aside(self, inbox: _Inbox, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> bool:
        """Whether the message was there already."""
        waiting = inbox.aside.get(tag)
        if not waiting:
            return False
        found = waiting.popleft()
        inbox.num_aside_bytes -= found.nbytes
        if not waiting:
            del inbox.aside[tag]
        self._check(spec_of(found), tensor, rank, tag, deadline)
        tensor.copy_(found)
        return True

    def _read_one(self, inbox: _Inbox, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> bool:
        if inbox.connection is None:
            inbox.connection = self._connect(rank, "mail", deadline, dials=False)
        header, _ = inbox.connection.receive_header(deadline=deadline)
        arrived, spec, read = self._announced(inbox.connection, header, rank, deadline)
        if arrived == tag:
            self._check(spec, tensor, rank, tag, deadline)
            read(tensor)
            return True
        if inbox.num_aside_bytes + spec.num_bytes() > MAX_ASIDE_BYTES:
            self._health.fail(
                "aborted",
                f"more than {MAX_ASIDE_BYTES >> 20} MiB of messages of {self._health.describe(rank)} wait for a "
                f"receive with their tag (the last has tag {arrived}); receive them, or send less ahead",
                rank,
            )
            raise self._health.error(deadline.operation)
        message = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        read(message)
        inbox.aside.setdefault(arrived, deque()).append(message)
        inbox.num_aside_bytes += message.nbytes
        return False

    def _announced(
        self, connection: Connection, header: Header, rank: int, deadline: Deadline
    ) -> tuple[int, TensorSpec, Callable[[torch.Tensor], object]]:
        """The tag of what comes next, its type and shape, and how to read it."""
        if header.kind == conveyor.KIND:
            carried = header.read_body(Carried)
            check_spec(carried.spec)
            return (
                carried.tag,
                carried.spec,
                lambda into: self._conveyor.receive(connection, carried, into, rank, deadline),
            )
        return (
            header.read_body(int),
            self._only_spec(header, rank, deadline),
            lambda into: connection.receive_tensors(header, deadline=deadline, into=[into]),
        )

    def _only_spec(self, header: Header, rank: int, deadline: Deadline) -> TensorSpec:
        if len(header.tensors) != 1:
            raise self._mismatch(
                f"{self._health.describe(rank)} sent {len(header.tensors)} tensors in a message",
                rank,
                deadline,
            )
        return header.tensors[0]

    def _check(self, sent: TensorSpec, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> None:
        wanted = spec_of(tensor)
        if sent != wanted:
            text = (
                f"{self._health.describe(rank)} sent {describe([sent])} with tag {tag} where "
                f"{self._health.describe(self._health.rank)} receives {describe([wanted])}"
            )
            raise self._mismatch(text, rank, deadline)

    def _mismatch(self, text: str, rank: int, deadline: Deadline) -> GroupError:
        self._health.fail("mismatch", text, rank)
        return self._health.error(deadline.operation)

    def close(self) -> None:
        self._conveyor.close()
        for connection in list(self._outboxes.values()):
            connection.close()
        for inbox in list(self._inboxes.values()):
            if inbox.connection is not None:
                inbox.connection.close()
