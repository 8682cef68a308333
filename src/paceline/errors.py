"""All errors that a script may want to catch, in one tree. Each names the peer or member, the operation and, where
there is one, the remedy.

    PacelineError
    ├── TrainingError           a training cannot go on in this process
    │   ├── NonFiniteGradient   a gradient is not finite, and the session was told to stop then
    │   ├── Refused             this worker does not fit the run: another model, other data, another version
    │   ├── Evicted             the run goes on without this worker
    │   ├── EndedAlone          the script ended here, and the other workers went on
    │   ├── Orphaned            the coordinator is gone, and nobody can say how to go on
    │   └── RunFailed           the run failed elsewhere; the message is the root cause
    ├── StrategyError           gradients cannot become an update
    │   ├── Disagreement        workers differ in something that must be the same on all
    │   └── Diverged            workers hold different parameters
    ├── ServerError             the server group cannot do what is asked of it
    │   ├── RequestRefused      a server could not do it: a gradient that is not finite, no memory; nothing changed
    │   └── Unserved            ranges that no server has served for too long
    ├── LoaderError             batches can no longer be loaded
    ├── CheckpointError         cannot be written, read or removed; the message says what to do
    │   ├── CorruptCheckpoint   not what was written: bytes changed, files missing or cut short
    │   └── DiskFull            no room; names the path, the bytes needed and the bytes free
    ├── RunRefused              a run cannot be started, or joined, as it was asked for
    ├── LaunchFailed            a run of `launch` failed, and no worker raised what could be raised here
    ├── GroupError              a group of members can no longer work together
    │   ├── PeerLost            a member died or became unreachable
    │   ├── Mismatch            members called different operations, or with different tensors
    │   ├── GroupAborted        somebody called abort
    │   └── GroupClosed         used after close
    ├── WireError               bytes between two members
    │   ├── ConnectionLost      the other side closed, reset or died
    │   ├── DeadlineExceeded    a wait took longer than it was allowed (also a TimeoutError)
    │   ├── HandshakeRefused    the other side did not prove that it belongs to the run
    │   ├── ProtocolError       bytes that are not a frame of ours, or over a limit
    │   └── AddressError        cannot listen or connect: port in use, unknown host, nobody there
    ├── CallFailed              the handler on the other side of a request raised
    └── OutOfSharedMemory       the host cannot give the memory that was asked for (also a MemoryError)

Errors that never leave Paceline are beside their code. Those of `paceline.c10d` are torch's types as well.

A `GroupError` ends its group: every later call on it raises the same error. Form a new group over the members that are
left. Wrong arguments, which only the caller can repair, are plain `ValueError` and `TypeError`, raised before anything
is sent. State that cannot be saved is a `TypeError` that names the place in the tree.
"""

from __future__ import annotations

from pathlib import Path
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


class TrainingError(PacelineError):
    """A training cannot go on in this process."""


class NonFiniteGradient(TrainingError):
    """A gradient is not finite; the step was not committed."""


class Refused(TrainingError):
    """This worker does not fit the run."""


class Evicted(TrainingError):
    """The run goes on without this worker, which was silent for too long or could not be reached."""


class EndedAlone(TrainingError):
    """The script ended on this worker, in order, where it did not end on the others."""


class Orphaned(TrainingError):
    """The coordinator was not heard of for too long."""


class RunFailed(TrainingError):
    """The run failed; the message is the root cause."""


class StrategyError(PacelineError):
    """A strategy cannot go on; the message says why and what to do."""


class Disagreement(StrategyError):
    """Workers differ in something that must be the same on all."""


class Diverged(StrategyError):
    """Workers hold different parameters. `ranks` are those that differ from the most."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ServerError(PacelineError):
    """The server group cannot do what is asked of it."""


class RequestRefused(ServerError):
    """A server refused a request; it says why. Nothing was changed by it."""


class Unserved(ServerError):
    """Some ranges were served by nobody within the time allowed."""


class LoaderError(PacelineError):
    """Batches can no longer be loaded: a loader worker died or was too slow, or the Loader was closed."""


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, read or removed."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is not what was written."""


class DiskFull(CheckpointError):
    """There is no room for a checkpoint."""

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room for a checkpoint in {path}: it needs {needed_bytes:,} bytes and {free_bytes:,} are free; make "
            "room there, keep fewer checkpoints, or choose a folder on another disk"
        )
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class RunRefused(PacelineError):
    """This run cannot be started, found or commanded as asked; the message says what to do."""


class LaunchFailed(PacelineError):
    """The run failed, and no worker raised what could be raised here; the message is the root cause."""
