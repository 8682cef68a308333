"""The contract of a path: how the members of a group move data among each other.

Two paths exist: `shared` (memory of one host) and `links` (sockets, between any members). Each offers the same moves,
on flat contiguous tensors that are changed in place; everything that a group offers is made of these. All members
call the same move with the same signature; a path finds out when they do not, and fails the group with both
signatures.

A move runs on the calling thread, is given a deadline, and raises `GroupError` or `DeadlineExceeded`; after an error
the contents of the tensors are undefined.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import torch

from paceline.collective.reductions import Reduction
from paceline.collective.signature import Signature
from paceline.wire.deadline import Deadline

# Called as sink(source, start, chunk): elements [start, start + len(chunk)) that `source` sent to this member.
# The chunk is only valid during the call.
Sink = Callable[[int, int, torch.Tensor], None]


class Operation(msgspec.Struct, frozen=True):
    """One entry of the group's sequence, under way on this member. `spins` says whether a wait may spin first."""

    number: int
    signature: Signature
    encoded: bytes
    deadline: Deadline
    spins: bool


class Path(Protocol):
    """`all_reduce` is not here: its algorithms have a file each."""

    def barrier(self, operation: Operation) -> None: ...

    def broadcast(self, operation: Operation, tensor: torch.Tensor, root: int) -> None: ...

    def reduce(self, operation: Operation, tensor: torch.Tensor, root: int, reduction: Reduction) -> None:
        """The result is in the root's tensor; the others' are left as they were."""

    def all_gather(self, operation: Operation, outputs: Sequence[torch.Tensor]) -> None:
        """outputs[rank] holds this member's piece on entry, all pieces on return; sizes may differ."""

    def exchange(
        self, operation: Operation, sends: Sequence[torch.Tensor], receives: Sequence[int], sink: Sink
    ) -> None:
        """Send sends[r] to each rank r and pass what comes to `sink`; receives[r] says how many elements r must send.
        What goes from a member to itself is the caller's matter."""


def bounds(num_elements: int, num_parts: int) -> list[tuple[int, int]]:
    """Cut [0, num_elements) into parts whose sizes differ by at most one."""
    edges = [num_elements * part // num_parts for part in range(num_parts + 1)]
    return list(itertools.pairwise(edges))


def spans(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into spans of `step`, the last one shorter."""
    return [(low, min(low + step, stop)) for low in range(start, stop, step)]


def into(outputs: Sequence[torch.Tensor]) -> Sink:
    """Keeps what comes from each rank in its tensor."""

    def keep(source: int, start: int, chunk: torch.Tensor) -> None:
        outputs[source][start : start + chunk.numel()].copy_(chunk)

    return keep
