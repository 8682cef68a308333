"""The plan: who takes part, in which order of ranks."""

from __future__ import annotations

import functools
from enum import Enum

import msgspec

from paceline.wire.card import Card

NOTHING = -1  # the number of the last operation of a member that holds no training state


class Phase(Enum):
    """Where a member stands, as it sees itself."""

    BUILDING = "building"  # the script runs, its session is not there yet
    READY = "ready"  # has built model and data; waits for a seat, or for the state
    ACTIVE = "active"
    LEAVING = "leaving"  # switched out of the run; waits to be released
    ENDED = "ended"  # applied the end; waits to be released
    FAILED = "failed"  # its script raised


class PlanStart(Enum):
    """How the members of a plan come to stand at the same operation."""

    FOUND = "found"  # the first seat has the state (new, or from a checkpoint) and gives it to all others
    RECOVER = "recover"  # all seats have the state; who is one operation behind gets that operation's result
    SWITCH = "switch"  # agreed in the header; newcomers get the state from a donor at the clean point


class Seat(msgspec.Struct, frozen=True):
    """`share` is a fixed part of every batch, beside those of the others; 0 in all seats of a plan leaves the shares to
    the workers, who give each what it can carry. Before a worker is measured, `capacity` is how fast it was declared to
    be, beside the others, and `tried` the fixed time of a step and that of a sample, in seconds, in its own trial."""

    card: Card
    share: int = 0
    capacity: float = 0.0
    tried: tuple[float, float] | None = None

    @property
    def member(self) -> str:
        return self.card.member

    @property
    def host(self) -> str:
        return self.card.host


class Plan(msgspec.Struct, frozen=True, dict=True):
    """Who takes part, in order of rank. Immutable; a generation is used for one plan only.

    `base` is the operation after which all stand when it starts (in a switch it is agreed in band). `gifts` says from
    whom a member gets what it lacks; `newcomers` lack everything."""

    generation: int
    start: PlanStart
    seats: tuple[Seat, ...]
    base: int = NOTHING
    gifts: dict[str, str] = {}
    newcomers: tuple[str, ...] = ()

    def rank_of(self, member: str) -> int:
        """The rank of a member, or -1."""
        return self._ranks.get(member, -1)

    @functools.cached_property
    def is_balanced(self) -> bool:
        """Whether the workers find their shares themselves."""
        return not any(seat.share for seat in self.seats)

    @functools.cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(seat.card.member for seat in self.seats)

    @functools.cached_property
    def _ranks(self) -> dict[str, int]:
        return {member: rank for rank, member in enumerate(self.members)}
