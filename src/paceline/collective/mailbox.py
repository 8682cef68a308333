"""Messages between two members, one at a time: how one is sent, and how the next one of a sender is read.

Each pair has a connection a direction, made by the sender when it first sends. Messages of one sender arrive in the
order sent; one with a tag that nobody has asked for yet is put aside, up to `MAX_ASIDE_BYTES`. Within a host, large
ones go through memory (`memory_channel`). Who waits for which message is the matter of `reception`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

import torch

from paceline.collective import memory_channel
from paceline.collective.health import Health
from paceline.collective.links import Connector
from paceline.collective.memory_channel import ChannelMessage, MemoryChannel
from paceline.errors import ConnectionLost, DeadlineExceeded, GroupError
from paceline.wire.connection import Connection, describe
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import DTYPES, spec_of
from paceline.wire.endpoint import Expectation
from paceline.wire.frame import Header, TensorSpec, check_spec
from paceline.wire.waiting import PLAIN, READ, is_ready

MAX_ASIDE_BYTES = 1 << 28
LATE_S = 0.05


# Given the tag of a message, the tensor that it is wanted in; None if nobody has asked for it yet.
Choose = Callable[[int], torch.Tensor | None]


class Inbox:
    """What has come, or will come, from one sender."""

    def __init__(self, expectation: Expectation) -> None:
        self.expectation = expectation
        self.connection: Connection | None = None
        self.aside: dict[int, deque[torch.Tensor]] = {}
        self.num_aside_bytes = 0

    def readable(self) -> tuple[int, int]:
        """The descriptor and the events that tell of the next message."""
        if self.connection is None:
            return self.expectation.fileno(), READ
        return self.connection.fileno(), self.connection.receive_events

    def may_bring(self) -> bool:
        """Whether there is a connection, the end of which was not read yet."""
        return self.connection is not None and not self.connection.closed

    def is_late(self) -> bool:
        """Whether the connection of a sender that has left is there, or comes within a moment: its handshake may have
        ended just now."""
        if self.connection is None:
            with contextlib.suppress(DeadlineExceeded):
                PLAIN.wait_any([self.readable()], Deadline(LATE_S, "a message of who has left"), "its connection")
                return True
        return False

    def has_more(self) -> bool:
        """Whether the next message, or the end of all, can be looked at without waiting."""
        if self.connection is None or self.connection.closed:
            return False
        return self.connection.has_buffered() or is_ready(*self.readable())


class Mailbox:
    """Sends to each peer come from one thread at a time, and so do all receives; `Messages` sees to that."""

    def __init__(self, health: Health, connector: Connector, channel: MemoryChannel) -> None:
        self._health = health
        self._connector = connector
        self._channel = channel
        self._outboxes: dict[int, Connection] = {}
        self._inboxes: dict[int, Inbox] = {}

    def send(self, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> None:
        if rank not in self._outboxes:
            self._outboxes[rank] = self._connector.connect(rank, "mail", deadline, dials=True)
        connection = self._outboxes[rank]
        try:
            if not self._channel.send(connection, tensor, rank, tag, deadline):
                connection.send("message", tag, [tensor], deadline=deadline)
        except ConnectionLost as error:
            raise self._health.gone(rank, f"was lost ({error})", deadline.operation) from error

    def inbox(self, rank: int) -> Inbox:
        """The inbox of a sender, with its connection as soon as there is one."""
        inbox = self._inboxes.get(rank)
        if inbox is None:
            # Who has left since may have left a message.
            inbox = self._inboxes[rank] = Inbox(self._connector.expect(rank, "mail", keeps_ended=True))
        if inbox.connection is None and inbox.expectation.is_there():
            inbox.connection = self._connector.welcome(rank, inbox.expectation)
        return inbox

    def take_aside(self, tensor: torch.Tensor, rank: int, tag: int, deadline: Deadline) -> bool:
        """Whether the message was there already."""
        inbox = self._inboxes.get(rank)
        waiting = inbox.aside.get(tag) if inbox is not None else None
        if inbox is None or not waiting:
            return False
        found = waiting.popleft()
        inbox.num_aside_bytes -= found.nbytes
        if not waiting:
            del inbox.aside[tag]
        self._check(spec_of(found), tensor, rank, tag, deadline)
        tensor.copy_(found)
        return True

    def read_one(self, rank: int, choose: Choose, deadline: Deadline) -> None:
        """Read the next message of a sender that is connected, into the tensor chosen for its tag, or put it aside."""
        inbox = self._inboxes[rank]
        assert inbox.connection is not None
        header, _ = inbox.connection.receive_header(deadline=deadline)
        tag, spec, read = self._announced(inbox.connection, header, rank, deadline)
        # An earlier one with this tag that nobody has taken yet comes first.
        tensor = None if inbox.aside.get(tag) else choose(tag)
        if tensor is not None:
            self._check(spec, tensor, rank, tag, deadline)
            read(tensor)
            return
        if inbox.num_aside_bytes + spec.num_bytes() > MAX_ASIDE_BYTES:
            self._health.fail(
                "aborted",
                f"more than {MAX_ASIDE_BYTES >> 20} MiB of messages of {self._health.describe(rank)} wait for a "
                f"receive with their tag (the last has tag {tag}); receive them, or send less ahead",
                rank,
            )
            raise self._health.error(deadline.operation)
        message = torch.empty(spec.shape, dtype=DTYPES[spec.dtype])
        read(message)
        inbox.aside.setdefault(tag, deque()).append(message)
        inbox.num_aside_bytes += message.nbytes

    def _announced(
        self, connection: Connection, header: Header, rank: int, deadline: Deadline
    ) -> tuple[int, TensorSpec, Callable[[torch.Tensor], object]]:
        """The tag of what comes next, its type and shape, and how to read it."""
        if header.kind == memory_channel.KIND:
            carried = header.read_body(ChannelMessage)
            check_spec(carried.spec)
            return (
                carried.tag,
                carried.spec,
                lambda into: self._channel.receive(connection, carried, into, rank, deadline),
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
        self._channel.close()
        for connection in list(self._outboxes.values()):
            connection.close()
        for inbox in list(self._inboxes.values()):
            inbox.expectation.close()
            if inbox.connection is not None:
                inbox.connection.close()
