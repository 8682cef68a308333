"""Where the ranges are: an immutable, numbered statement, made by the coordinator, held by servers and workers.

Of each range one server is *primary*: it alone takes pushes and answers pulls. *Backups* have everything that the
primary has acknowledged. Who is *joining* is being brought up: the primary sends it the state of the range and from
there on every change, and it becomes a backup when it has all of it.

A replica is named with the version *since* which it is one. A server that hears of itself with another `since` than
before starts anew: what it had of the range may be behind. The state of a range began, empty, in the version
*origin*: at the founding of the run, or when all who had it were lost; a worker then loads it.

A primary that is *handing* over takes nothing more, waits for what is under way, and says so; then primary and backups
hold the same, and the next version names the new primary.
"""

from __future__ import annotations

import functools

import msgspec

from paceline.wire.card import Card


class Replica(msgspec.Struct, frozen=True, array_like=True):
    server: str
    since: int


class Replicas(msgspec.Struct, frozen=True, array_like=True):
    """Of one range. `handing` is the backup that is about to be primary, since version `handing_since`."""

    primary: Replica
    backups: tuple[Replica, ...] = ()
    joining: tuple[Replica, ...] = ()
    origin: int = 0
    handing: str = ""
    handing_since: int = 0

    def everybody(self) -> tuple[Replica, ...]:
        return (self.primary, *self.backups, *self.joining)

    def of(self, server: str) -> Replica | None:
        return next((replica for replica in self.everybody() if replica.server == server), None)


class Placement(msgspec.Struct, frozen=True, dict=True):
    """`founding` is the generation of the plan that founded the run whose state this is, `began` the version in which
    that was: ranges whose origin is later were lost since."""

    version: int = 0
    founding: int = 0
    began: int = 0
    cards: tuple[Card, ...] = ()
    ranges: tuple[Replicas, ...] = ()

    @functools.cached_property
    def card_of(self) -> dict[str, Card]:
        return {card.member: card for card in self.cards}

    @functools.cached_property
    def ranges_of(self) -> dict[str, tuple[int, ...]]:
        """The ranges that each server is primary of."""
        found: dict[str, list[int]] = {card.member: [] for card in self.cards}
        for number, replicas in enumerate(self.ranges):
            found.setdefault(replicas.primary.server, []).append(number)
        return {server: tuple(numbers) for server, numbers in found.items()}
