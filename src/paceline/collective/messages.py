"""Send and receive as operations: checked, with a deadline, on the calling thread or behind a `Handle`.

Messages of one peer and direction are sent, and received, in the order of the calls, whatever their tags; they wait
in no line with the collectives and never hold one up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from paceline.collective import arguments
from paceline.collective.arguments import flat
from paceline.collective.health import Health
from paceline.collective.lane import DONE, Handle, Lane
from paceline.collective.mailbox import Mailbox
from paceline.collective.sequencer import ending_group
from paceline.wire.deadline import Deadline

Transfer = Callable[[torch.Tensor, int, int, Deadline], None]


class Messages:
    def __init__(self, health: Health, mailbox: Mailbox) -> None:
        self._health = health
        self._mailbox = mailbox
        self._lanes: dict[str, Lane] = {}
        self._guard = threading.Lock()

    def send(self, tensor: torch.Tensor, rank: int, tag: int, async_op: bool, timeout_s: float) -> Handle:
        return self._do("send to", self._mailbox.send, tensor, rank, tag, async_op, timeout_s)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int, async_op: bool, timeout_s: float) -> Handle:
        return self._do("recv from", self._mailbox.receive, tensor, rank, tag, async_op, timeout_s)

    def _do(
        self, verb: str, transfer: Transfer, tensor: torch.Tensor, rank: int, tag: int, async_op: bool, timeout_s: float
    ) -> Handle:
        self._check(tensor, rank, tag, writes=verb == "recv from")
        operation = f"{verb} {self._health.describe(rank)}"
        Deadline(timeout_s, operation)  # a wrong number is the caller's error, found before anything is sent

        def job(_: bool) -> None:
            with ending_group(self._health, operation), flat(tensor, writes=verb == "recv from") as data:
                transfer(data.view(tensor.shape), rank, tag, Deadline(timeout_s, operation))

        lane = self._lane(operation)
        if async_op:
            return lane.submit(operation, job)
        lane.run(operation, job)
        return DONE

    def _check(self, tensor: torch.Tensor, rank: int, tag: int, *, writes: bool) -> None:
        arguments.check_tensor("tensor", tensor, writes=writes)
        arguments.check_rank("rank", rank, len(self._health.cards))
        if rank == self._health.rank:
            raise ValueError(f"rank {rank} cannot send to or receive from itself; copy the tensor instead")
        if not isinstance(tag, int) or not 0 <= tag < 1 << 63:
            raise ValueError(f"tag={tag!r} is not a number of 0..2^63-1")

    def _lane(self, operation: str) -> Lane:
        with self._guard:
            return self._lanes.setdefault(operation, Lane(f"paceline-{operation}"))

    def close(self) -> None:
        with self._guard:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
