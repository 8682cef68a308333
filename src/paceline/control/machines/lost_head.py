"""What a member does about a coordinator that is not heard of any more, with its host perhaps: pure rules.

`paceline.train.halting` acts on them for a worker, `paceline.server.member` for a server.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from paceline.control.messages.plan import Plan

WORKING_PATIENCE_S = 600.0  # of a group that works, with workers on the coordinator's host
DESERTED_S = 60.0  # of a server: longer than a worker is away that saves what it holds


class OrphanMove(Enum):
    WAIT = "wait"
    STOP = "stop"  # ask the others, in the header, to end at the next clean point
    BREAK = "break"  # give the group up


class Sight(NamedTuple):
    """What a worker sees: how long the coordinator was not heard of, how long the operation under way has taken (0 in
    none), whether there is a plan, whether that has a seat on the coordinator's host, and whether this worker was asked
    to go."""

    unheard_s: float
    stood_s: float
    has_plan: bool
    is_with_head: bool
    is_asked: bool = False


def decide(sight: Sight, patience_s: float) -> OrphanMove:
    """Who has no plan gives up by itself, where it waits for one."""
    if sight.unheard_s < patience_s or not sight.has_plan:
        return OrphanMove.WAIT
    if sight.stood_s >= patience_s:
        return OrphanMove.BREAK
    if sight.is_with_head and not sight.is_asked and sight.unheard_s < WORKING_PATIENCE_S:
        return OrphanMove.WAIT  # the host lives; its agent brings the coordinator back
    return OrphanMove.STOP


def is_deserted(unheard_s: float, alone_s: float) -> bool:
    """Whether nobody will need a server of a joined host any more: neither the coordinator was heard of for long, nor
    was any worker there. Workers that save what they hold need it until they have ended."""
    return unheard_s >= DESERTED_S and alone_s >= DESERTED_S


def has_seat_on(plan: Plan | None, host: str) -> bool:
    return plan is not None and any(seat.host.partition(" ")[0] == host for seat in plan.seats)
