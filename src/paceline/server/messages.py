"""What workers say to servers, and servers to each other, beside the tensors.

A worker sends one request to each server for all the ranges it is primary of. In it come, in this order, the commit of
an earlier step, a push, and a pull; each may be missing. The answer names the ranges for which something was refused,
and why; for all others it is done, and every backup has it.
"""

from __future__ import annotations

from enum import IntEnum

import msgspec

from paceline.server.parcels import Detail, UpdateSettings

Spans = tuple[tuple[int, int], ...]  # of numbers, from the first to the last of each


class Refusal(IntEnum):
    MOVED = 1  # another server is primary: ask where
    EMPTY = 2  # nobody has loaded the range yet
    EARLY = 3  # what the request builds on is not there yet: ask again
    STALE = 4  # of a generation that is over


class StageStep(msgspec.Struct, frozen=True, array_like=True, tag="stage"):
    """One worker's gradients of a step: kept until a commit says that the step counts."""

    generation: int
    step: int
    rank: int


class CommitStep(msgspec.Struct, frozen=True, array_like=True):
    """The step counts: apply what its `num_ranks` workers have staged, times `scale`, with these settings of the
    optimizers. `by` is the generation that says so, if it is a later one than that of the attempt."""

    generation: int
    step: int
    num_ranks: int
    scale: float
    settings: UpdateSettings = UpdateSettings()
    by: int = 0


class Fence(msgspec.Struct, frozen=True, array_like=True, tag="fence"):
    """Generations below commit nothing any more: their workers go on with other gradients. `step` is the one that this
    generation is about to do; the answer says where it was made already."""

    generation: int
    step: int = 0


class ApplyLease(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """The gradients of a lease, which are applied at once, and once only. `number` is that of the update, from 1, as
    if leases were done one after the other. One that `is_void` counts, and changes nothing."""

    epoch: int
    lease: int
    number: int = 1
    scale: float = 1.0
    settings: UpdateSettings = UpdateSettings()
    is_void: bool = False


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """The state of ranges that are empty since the placement of version `origin`. What is `restored` takes the place of
    a state that was lost, perhaps with pushes that were acknowledged. `num_leases` are those of an epoch, which say how
    lost ones are numbered; 0 where there are none."""

    origin: int
    restored: bool = False
    step: int = 0
    epoch: int = 0
    prefix: int = 0
    beyond: tuple[int, ...] = ()
    num_leases: int = 0


Push = StageStep | ApplyLease | Load | Fence


class Need(msgspec.Struct, frozen=True, array_like=True):
    """What a pull must see: the commit of a step, or all leases of an epoch below `prefix`. Those below `settled` are
    known to be done: where a range was restored after a loss, some of them are gone, and not waited for."""

    step: int = 0
    epoch: int = 0
    prefix: int = 0
    settled: int = 0


class ServerRequest(msgspec.Struct, frozen=True, tag="request"):
    """`version` is the placement that the worker goes by, `began` the version in which the run was founded whose state
    that is, -1 if that is not said. `detail` describes the tensors that come along, and what is to be pulled, for the
    store. `exports` asks for the whole state of the ranges, `notes` for what was applied to what is pulled. `seen` is
    how many updates the server had made when this worker last pulled, -1 if that is not known. Who is `orphaned` has no
    coordinator any more that would name another primary: whoever has a range speaks for it, and waits for nobody."""

    version: int
    ranges: tuple[int, ...]
    commit: CommitStep | None = None
    push: Push | None = None
    pull: Need | None = None
    exports: bool = False
    notes: bool = False
    seen: int = -1
    began: int = -1
    orphaned: bool = False
    detail: Detail = Detail()


class ServerAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """`version` is the placement that the server goes by. Ranges that are not named are done. Where the step that a
    generation is about to do has been made already, of an earlier one's attempt, `counted` says of which. `records` say
    what has been applied to ranges, where that was asked for, `updates` how many updates the server has made. `forgone`
    are updates that count and that ranges which were restored after a loss never got, by their numbers, from and to.
    It is said with every commit, and whenever records are asked for: an answer may be lost."""

    version: int
    pushed: dict[int, Refusal] = {}
    pulled: dict[int, Refusal] = {}
    counted: dict[int, CommitStep] = {}
    records: dict[int, RangeRecord] = {}
    updates: int = 0
    forgone: dict[int, Spans] = {}
    detail: Detail | None = None


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """From a primary to one who backs it up: the same change, in the same order. A `snapshot` is the whole state of
    the one range that it names, for the replica that is one since that version."""

    version: int
    number: int
    ranges: tuple[int, ...]
    commit: CommitStep | None = None
    push: Push | None = None
    snapshot: int = 0
    record: RangeRecord | None = None
    detail: Detail = Detail()


class Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged"):
    """All forwards up to `number` were taken, but for these ranges, of which the sender is not the primary in the
    placement of this `version`."""

    number: int
    refused: tuple[int, ...] = ()
    version: int = 0


class RequestFailed(msgspec.Struct, frozen=True, tag="failed"):
    """A request raised this on the server, before it changed anything."""

    text: str


class RangeRecord(msgspec.Struct, frozen=True, array_like=True):
    """What has been applied to a range, as it travels with its state. `staged` are (generation, step, rank), `forgone`
    updates that count and will never be applied to it."""

    loaded: bool
    lossy: bool
    step: int
    epoch: int
    prefix: int
    beyond: tuple[int, ...]
    generation: int
    staged: tuple[tuple[int, int, int], ...] = ()
    counted: CommitStep | None = None
    num_leases: int = 0
    forgone: Spans = ()


Message = ServerRequest | ServerAnswer | RequestFailed | Forward | Acknowledged
