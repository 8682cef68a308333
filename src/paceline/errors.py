"""One tree of errors; each names the peer or member, the operation and, where there is one, the remedy.

    PacelineError
    ├── WireError               bytes between two members
    │   ├── ConnectionLost      the other side closed, reset or died
    │   ├── DeadlineExceeded    a wait took longer than it was allowed (also a TimeoutError)
    │   ├── HandshakeRefused    the other side did not prove that it belongs to the run
    │   ├── ProtocolError       bytes that are not a frame of ours, or over a limit
    │   └── AddressError        cannot listen or connect: port in use, unknown host, nobody there
    ├── CallFailed              the handler on the other side of a request raised
    ├── OutOfSharedMemory       the host cannot give the memory that was asked for (also a MemoryError)
    └── GroupError              a group of members can no longer work together
        ├── PeerLost            a member died or became unreachable
        ├── Mismatch            members called different operations, or with different tensors
        ├── GroupAborted        somebody called abort
        └── GroupClosed         used after close

Floors above have their own, beside their code, all of them under `PacelineError`:

    custody      CustodyError
    control      JournalError, FolderRefused
    data         LoaderError
    checkpoint   CheckpointError: CorruptCheckpoint, DiskFull
    strategy     StrategyError: Disagreement, Diverged
    c10d         PeerLost, Mismatch, Aborted, TimedOut, WrongCall, OutOfMemory, StoreFailed, Unreachable, each one
                 of torch's too
    engine       EngineError, RunRefused, LaunchFailed
    train        TrainingError: NonFiniteGradient, Refused, Evicted, Orphaned, RunFailed
    testing, cli NetlabError, BenchError

A `GroupError` ends its group: every later call on it raises the same error. Form a new group over who is left.
Wrong arguments, which only the caller can repair, are plain `ValueError` and `TypeError` raised before anything is
sent.
"""

from __future__ import annotations

from typing import Any


class PacelineError(Exception):
    """The root of all errors that Paceline raises on its own account."""


class WireError(PacelineError):
    """Something went wrong between two members."""


class ConnectionLost(WireError):
    """The other side closed the connection, reset it or died."""


class DeadlineExceeded(WireError, TimeoutError):
    """A wait took longer than it was allowed. `members` are the ids of those that were waited for, where it is known
    that nobody else was."""

    members: tuple[str, ...] = ()


class HandshakeRefused(WireError):
    """The other side did not prove that it belongs to the run."""


class ProtocolError(WireError):
    """The other side sent bytes that are not a frame of ours, or that are over a limit."""


class AddressError(WireError):
    """Cannot listen or connect there."""


class CallFailed(PacelineError):
    """The handler on the other side of a request raised; the message carries its error."""


class OutOfSharedMemory(PacelineError, MemoryError):
    """The host cannot give the shared memory that was asked for."""


class GroupError(PacelineError):
    """The group can no longer work; form a new one over the members that are left."""


class PeerLost(GroupError):
    """A member died or became unreachable. `member` is its id, `rank` its rank in the group that was lost; `died` says
    that the kernel has seen its end."""

    def __init__(self, message: str, *, member: str, rank: int, died: bool = False) -> None:
        super().__init__(message)
        self.member = member
        self.rank = rank
        self.died = died

    def __reduce__(self) -> tuple[Any, ...]:
        return _lost_again, (str(self), self.member, self.rank, self.died)


def _lost_again(message: str, member: str, rank: int, died: bool) -> PeerLost:
    """Unpickles a `PeerLost`, whose arguments have names."""
    return PeerLost(message, member=member, rank=rank, died=died)


class Mismatch(GroupError):
    """Members called different operations, or the same one with tensors that do not fit together. `is_internal` says
    that no script can be the cause: Paceline itself did different things on two members."""

    def __init__(self, message: str, *, is_internal: bool = False) -> None:
        super().__init__(message)
        self.is_internal = is_internal

    def __reduce__(self) -> tuple[Any, ...]:
        return _differed_again, (type(self), str(self), self.is_internal)


def _differed_again(kind: type[Mismatch], message: str, is_internal: bool) -> Mismatch:
    """Unpickles a `Mismatch`, one of whose arguments has a name."""
    return kind(message, is_internal=is_internal)


class GroupAborted(GroupError):
    """`abort` was called, here or on another member."""


class GroupClosed(GroupError):
    """The group was closed before this call."""
