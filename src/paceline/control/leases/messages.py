"""What workers and the coordinator say to each other of leases."""

from __future__ import annotations

import math

import msgspec

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.messages.progress import StepRow

GRANTED_AHEAD = 2  # leases that a worker holds, with the one that it is at


class LeaseDone(msgspec.Struct, frozen=True, array_like=True):
    """A lease that is done, with the mean loss of its samples and how long it took."""

    lease: int
    loss: float = 0.0
    seconds: float = 0.0


class LeaseReport(msgspec.Struct, frozen=True):
    """All that matters of a worker's leases: those it holds, the one it is at (-1: none), those it has done and has not
    been told that they are remembered. `heard` is the number of the newest grant it knows, `wants` how many it would
    like to hold. The epoch has `num_leases` of `batch` samples, of which `begun` were done before the run was founded;
    a whole epoch has `length` samples. `is_finished`: it was told that all are done, and has gone on. All below
    `prefix` are done: it was told that they are remembered, and speaks no more of its own among them."""

    member: str
    epoch: int
    num_leases: int
    heard: int = 0
    wants: int = 0
    held: tuple[int, ...] = ()
    started: int = -1
    done: tuple[LeaseDone, ...] = ()
    batch: int = 1
    length: int = 0
    is_finished: bool = False
    begun: LeaseSet = msgspec.field(default_factory=LeaseSet)
    prefix: int = 0


class LeaseGrant(msgspec.Struct, frozen=True):
    """The leases that a worker holds, as the coordinator sees it. All below `settled` are done, and all below `prefix`
    are remembered as done; `is_finished` when all of the epoch are. `is_stopped`: no more leases are handed out,
    because the run is to end."""

    term: int
    number: int
    member: str
    epoch: int
    leases: tuple[int, ...] = ()
    settled: int = 0
    prefix: int = 0
    is_finished: bool = False
    is_stopped: bool = False


def row_of(report: LeaseReport, done: LeaseDone, generation: int) -> StepRow:
    """A lease that is done, as a row of the run's database: as if leases were steps."""
    position, per_epoch = done.lease * report.batch, -(-report.length // report.batch)
    return StepRow(
        operation=report.epoch * per_epoch + done.lease + 1,
        generation=generation,
        epoch=report.epoch,
        position=position,
        count=min(report.batch, report.length - position),
        loss=done.loss,
        seconds=done.seconds,
    )


def rows_of_begun(report: LeaseReport, generation: int) -> tuple[StepRow, ...]:
    """Those of the leases that were done before the run was founded, of which nothing else is known here."""
    leases = [*range(report.begun.prefix), *sorted(report.begun.beyond)]
    return tuple(row_of(report, LeaseDone(lease, math.nan, 0.0), generation) for lease in leases)
