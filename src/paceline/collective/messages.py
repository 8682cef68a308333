"""Send and receive as operations: checked, with a deadline, on the calling thread or behind a `Handle`.

Messages to one peer are sent in the order of the calls, and received in that order by those who ask for their tag;
they wait in no line with the collectives and never hold one up.
"""

from __future__ import annotations

import threading

import torch

from paceline.collective import arguments
from paceline.collective.arguments import flat
from paceline.collective.health import Health
from paceline.collective.lane import DONE, Handle, Lane, Receiving, received
from paceline.collective.mailbox import Mailbox
from paceline.collective.reception import Reception
from paceline.collective.sequencer import ending_group
from paceline.wire.deadline import Deadline


class Messages:
    def __init__(self, health: Health, mailbox: Mailbox) -> None:
        self._health = health
        self._mailbox = mailbox
        self._reception = Reception(health, mailbox)
        self._lanes: dict[int, Lane] = {}
        self._guard = threading.Lock()

    def send(self, tensor: torch.Tensor, rank: int, tag: int, async_op: bool, timeout_s: float) -> Handle:
        self._check(tensor, rank, tag, writes=False)
        operation = f"send to {self._health.describe(rank)}"
        Deadline(timeout_s, operation)  # a wrong number is the caller's error, found before anything is sent

        def job(_: bool) -> None:
            with ending_group(self._health, operation), flat(tensor, writes=False) as data:
                self._mailbox.send(data, rank, tag, Deadline(timeout_s, operation))

        lane = self._lane(rank, operation)
        if async_op:
            return lane.submit(operation, job)
        lane.run(operation, job)
        return DONE

    def receive(self, tensor: torch.Tensor, rank: int | None, tag: int, async_op: bool, timeout_s: float) -> Receiving:
        self._check(tensor, rank, tag, writes=True)
        operation = "recv from anybody" if rank is None else f"recv from {self._health.describe(rank)}"
        Deadline(timeout_s, operation)  # as above
        whole = flat(tensor)
        data = whole.__enter__()  # sender and receiver compare type and number of elements, not shapes
        if async_op:
            receipt = self._reception.post(data, rank, tag, operation, timeout_s)
            reception = self._reception
            return Receiving(
                operation, receipt.future, whole, lambda: reception.await_now(receipt), reception.drives_here
            )
        source = self._reception.receive(data, rank, tag, operation, timeout_s)
        whole.__exit__(None)
        return received(source)

    def _check(self, tensor: torch.Tensor, rank: int | None, tag: int, *, writes: bool) -> None:
        arguments.check_tensor("tensor", tensor, writes=writes)
        if rank is not None:
            arguments.check_rank("rank", rank, len(self._health.cards))
        if rank == self._health.rank:
            raise ValueError(f"rank {rank} cannot send to or receive from itself; copy the tensor instead")
        if not isinstance(tag, int) or not 0 <= tag < 1 << 63:
            raise ValueError(f"tag={tag!r} is not a number of 0..2^63-1")

    def _lane(self, rank: int, operation: str) -> Lane:
        with self._guard:
            if rank not in self._lanes:
                self._lanes[rank] = Lane(f"paceline-{operation}")
            return self._lanes[rank]

    def disown(self) -> None:
        """In a forked child."""
        self._guard = threading.Lock()
        for lane in self._lanes.values():
            lane.disown()
        self._reception.disown()

    def close(self) -> None:
        with self._guard:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        self._reception.close()
