"""Where the ranges should be: consistent hashing with bounded load.

A range stays where it is as long as its server lives and is not too full. What has no place takes the first server of
its walk that has room. Then the fullest servers (beside what they can carry) hand ranges to the emptiest until all are
within `SLACK` of their part, or nothing more can be gained; the ranges that go are those in whose walk the taker comes
earliest, which is what consistent hashing would have moved.

Backups follow the same rules by the weight of what they back up. A backup is never on the server of its primary, and
not on its host if another host has a server.

Invariants: every range has one primary, and as many backups as were asked for or as there are other servers; the same
input gives the same answer everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.placement.ring import Ring

SLACK = 0.05


class Site(NamedTuple):
    """A server, as far as placing is concerned."""

    capacity: float
    host: str


Homes = tuple[str, ...]  # of one range: the primary's server, then its backups'


def place(
    weights: Sequence[float],
    sites: Mapping[str, Site],
    num_replicas: int,
    present: Sequence[Homes] = (),
) -> list[Homes]:
    """The homes of all ranges. `present` are those they have now, of which some may be gone."""
    if not sites:
        raise ValueError("there is no server to place ranges on")
    known = [tuple(home for home in homes if home in sites) for homes in present] or [()] * len(weights)
    if len(known) != len(weights):
        raise ValueError(f"{len(present)} ranges have homes, but there are {len(weights)} ranges")
    walk = functools.cache(Ring({name: site.capacity for name, site in sites.items()}).walk)
    capacities = {name: site.capacity for name, site in sites.items()}
    homes: list[list[str]] = [[] for _ in weights]
    for rank in range(min(num_replicas, len(sites))):
        layer = _Layer(weights, capacities)
        for number in range(len(weights)):
            banned = banned_beside(homes[number], sites)
            wish = known[number][rank] if rank < len(known[number]) else ""
            if wish and wish not in banned:
                layer.put(number, wish)
            else:
                layer.find_room(number, [name for name in walk(number) if name not in banned])
        layer.level(walk, [banned_beside(taken, sites) for taken in homes])
        for number, home in enumerate(layer.home):
            homes[number].append(home)
    return [tuple(taken) for taken in homes]


def banned_beside(taken: Sequence[str], sites: Mapping[str, Site]) -> set[str]:
    """Where one more replica must not be: beside another on its server, or its host if that can be helped."""
    hosts = {sites[name].host for name in taken}
    elsewhere = {name for name, site in sites.items() if site.host not in hosts}
    return set(sites) - elsewhere if taken and elsewhere else set(taken)


class _Layer:
    """All primaries, or all first backups, and so on: one home for each range."""

    def __init__(self, weights: Sequence[float], capacities: Mapping[str, float]) -> None:
        self._weights = weights
        total = sum(capacities.values())
        self._part = {name: sum(weights) * capacity / total for name, capacity in capacities.items()}
        self._load = dict.fromkeys(capacities, 0.0)
        self.home: list[str] = [""] * len(weights)

    def put(self, number: int, home: str) -> None:
        if self.home[number]:
            self._load[self.home[number]] -= self._weights[number]
        self.home[number] = home
        self._load[home] += self._weights[number]

    def find_room(self, number: int, walk: Sequence[str]) -> None:
        weight = self._weights[number]
        for name in walk:
            if self._load[name] + weight <= (1 + SLACK) * self._part[name]:
                self.put(number, name)
                return
        self.put(number, min(walk, key=lambda name: self._fullness(name, weight)))

    def _fullness(self, name: str, more: float = 0.0) -> float:
        return (self._load[name] + more) / self._part[name] if self._part[name] else float("inf")

    def level(self, walk: functools._lru_cache_wrapper[list[str]], banned: Sequence[set[str]]) -> None:
        for _ in range(4 * len(self._weights)):
            if not self._move_one(walk, banned):
                return

    def _move_one(self, walk: functools._lru_cache_wrapper[list[str]], banned: Sequence[set[str]]) -> bool:
        """From a server that is too full, or to one that is too empty; whether there was anything to gain."""
        order = sorted(self._load, key=lambda name: (self._fullness(name), name))
        for giver in reversed(order):
            for taker in order:
                gap = self._fullness(giver) - self._fullness(taker)
                is_level = self._fullness(giver) <= 1 + SLACK and self._fullness(taker) >= 1 - SLACK
                if is_level or gap <= 0:
                    break
                best = self._best_to_move(giver, taker, walk, banned)
                if best is not None:
                    self.put(best, taker)
                    return True
        return False

    def _best_to_move(
        self, giver: str, taker: str, walk: functools._lru_cache_wrapper[list[str]], banned: Sequence[set[str]]
    ) -> int | None:
        """The range whose move brings both nearer to their parts; of those the one that the taker is nearest to."""
        found: tuple[int, float, int] | None = None
        before = max(abs(self._fullness(giver) - 1), abs(self._fullness(taker) - 1))
        for number, home in enumerate(self.home):
            weight = self._weights[number]
            if home != giver or taker in banned[number] or weight <= 0:
                continue
            after = max(abs(self._fullness(giver, -weight) - 1), abs(self._fullness(taker, weight) - 1))
            if after < before - 1e-9:
                candidate = (walk(number).index(taker), -weight, number)
                found = min(found, candidate) if found is not None else candidate
        return found[2] if found is not None else None
