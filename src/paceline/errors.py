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
    """The root of all errors that Paceline raises on its own account.

    >>> try:
    ...     paceline.load_model(model, "runs/digits/checkpoints/lost")
    ... except paceline.errors.PacelineError as error:
    ...     print(error)
    """


class WireError(PacelineError):
    """Something went wrong on a connection between two members.

    For example: "this server has failed"
    """


class ConnectionLost(WireError):
    """The other side closed the connection, reset it or died.

    For example: "server ... is gone"
    """


class DeadlineExceeded(WireError, TimeoutError):
    """A wait took longer than it was allowed. `members` are the ids of those that were waited for, where it is known
    that nobody else was.

    For example: "...: waited ... s for ..."
    """

    members: tuple[str, ...] = ()


class HandshakeRefused(WireError):
    """The other side did not prove that it belongs to the run.

    For example: "... does not have the secret of this run"
    """


class ProtocolError(WireError):
    """The other side sent bytes that are not a frame of ours, or that are over a limit.

    For example: "the coordinator sent ..., which no member understands"
    """


class AddressError(WireError):
    """This process cannot listen or connect at an address.

    For example: "cannot reach ...; is the other side still running, and is a firewall in between?"
    """


class CallFailed(PacelineError):
    """The handler on the other side of a request raised; the message carries its error.

    For example: "... on ...: ..."
    """


class OutOfSharedMemory(PacelineError, MemoryError):
    """The host cannot give the shared memory that was asked for.

    For example: "no ... MiB of shared memory: ..."
    """


class GroupError(PacelineError):
    """The group can no longer work; form a new one over the members that are left. A session does so by itself.

    For example: "... in group ...: ..."
    """


class PeerLost(GroupError):
    """A member died or became unreachable. `member` is its id, `rank` its rank in the group that was lost; `died` says
    that the kernel has seen its end.

    For example: "...; form a new group over the members that are left"
    """

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
    that no script can be the cause: Paceline itself did different things on two members.

    For example: "... does not fit what another worker does; ..."
    """

    def __init__(self, message: str, *, is_internal: bool = False) -> None:
        super().__init__(message)
        self.is_internal = is_internal

    def __reduce__(self) -> tuple[Any, ...]:
        return _differed_again, (type(self), str(self), self.is_internal)


def _differed_again(kind: type[Mismatch], message: str, is_internal: bool) -> Mismatch:
    """Unpickles a `Mismatch`, one of whose arguments has a name."""
    return kind(message, is_internal=is_internal)


class GroupAborted(GroupError):
    """`abort` was called, here or on another member.

    For example: "an attempt at a step ended after a part of its gradients was sent"
    """


class GroupClosed(GroupError):
    """The group was closed before this call.

    For example: "the group was closed"
    """


class TrainingError(PacelineError):
    """A training cannot go on in this process; the errors below it say why.

    For example: "the workers do not fit together: ... differs from ..."
    """


class NonFiniteGradient(TrainingError):
    """A gradient is not finite; the step was not made.

    For example: "not finite in step ...; look at the samples of that share, or lower the learning rate"
    """


class Refused(TrainingError):
    """This worker does not fit the run: another model, other data, another version.

    For example: "... differs from ...: ..."
    """


class Evicted(TrainingError):
    """The run goes on without this worker, which was silent for too long or could not be reached.

    For example: "the checkpoint of operation ... cannot be read"
    """


class EndedAlone(TrainingError):
    """The script ended on this worker, in order, where it did not end on the others.

    For example: "the script ended on this worker after operation ..., and the others went on"
    """


class Orphaned(TrainingError):
    """The coordinator was not heard of for too long.

    For example: "operation ... waits for a plan, but the coordinator has been silent for ... s"
    """


class RunFailed(TrainingError):
    """The run failed elsewhere; the message is the root cause.

    For example: "the workers do not fit together: ..."
    """


class StrategyError(PacelineError):
    """A strategy cannot go on; the message says why and what to do.

    For example: "the weights of all workers sum to 0, so that there is no mean loss"
    """


class Disagreement(StrategyError):
    """Workers differ in something that must be the same on all.

    For example: "hyper-parameters differ (...): ..."
    """


class Diverged(StrategyError):
    """Workers hold different parameters. `ranks` are those that differ from the most.

    For example: "parameters differ between workers: ..."
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ServerError(PacelineError):
    """The server group cannot do what is asked of it.

    For example: "no server that can be reached has the ranges ..."
    """


class RequestRefused(ServerError):
    """A server refused a request: no memory, or a gradient that is not finite. Nothing was changed by it.

    For example: "server ... refused: ..."
    """


class Unserved(ServerError):
    """Some ranges were served by nobody within the time allowed.

    For example: "waited ... s for ranges ...; see the log of the servers"
    """


class LoaderError(PacelineError):
    """Batches can no longer be loaded: a loader worker died or was too slow, or the Loader was closed.

    For example: "... did not come: loader workers died ... times in a row"
    """


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, read or removed.

    >>> try:
    ...     paceline.load_model(model, "runs/digits/checkpoints/lost")
    ... except paceline.errors.CheckpointError:
    ...     print("begin anew")
    """


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is not what was written: bytes changed, files missing or cut short.

    For example: "its checksum does not match: bytes were changed"
    """


class DiskFull(CheckpointError):
    """There is no room for a checkpoint.

    For example: "no room for a checkpoint in ...: it needs ... bytes and ... are free"
    """

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room for a checkpoint in {path}: it needs {needed_bytes:,} bytes and {free_bytes:,} are free; make "
            "room there, keep fewer checkpoints, or choose a folder on another disk"
        )
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes


class RunRefused(PacelineError):
    """This run cannot be started, found or commanded as asked; the message says what to do.

    For example: "the name ... was used before in ..."
    """


class LaunchFailed(PacelineError):
    """The run failed, and no worker raised what could be raised here; the message is the root cause.

    >>> def tried(lr):
    ...     try:
    ...         return paceline.launch(train, lr, workers=2)
    ...     except paceline.errors.LaunchFailed:
    ...         return None
    """
