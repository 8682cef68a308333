"""Which range a server with too much to do gives to another: the best single move, or none.

A load is what a server has to do beside the mean of all: 1.0 is that of each when all have the same. It is the sum of
what its ranges cost it, as primary or as backup, in the seconds that the server itself measured; so a machine that is
slower than it was declared has a higher load for the same ranges, and gives some away.

Three moves are known, and all of them are what `evolving` does anyway:

    swap      the primary and one of its backups change places: no state is moved
    hand on   another server takes the place of the primary
    replace   another server takes the place of a backup

A move is worth it if the fuller of the two servers is relieved by `LEAST_GAIN` of the mean at least. It is predicted
that a range costs its new server what it cost the old one: this makes too little of a move to a faster server, which
only means that another one follows. A range that moved before rests, longer each time (`Rests`): what was predicted
wrongly, or varies, is not moved to and fro.

No server is made to hold more than `MOST_BYTES` times its part by capacity: load moves, but memory has an end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.placement.placing import Homes, Site, banned_beside

LEAST_GAIN = 0.05
MOST_BYTES = 1.5
_ALIKE = 0.02  # moves whose results differ by less are told apart by how many bytes they move

Costs = Mapping[str, Mapping[int, float]]  # by server, of each range that it has


class Move(NamedTuple):
    """One range gets other homes. `before` and `after` are the load of the fuller of both servers."""

    number: int
    giver: str
    taker: str
    homes: Homes
    before: float
    after: float
    num_bytes: int = 0  # that have to be brought to the taker


def loads_of(costs: Costs) -> dict[str, float]:
    return {server: sum(ranges.values()) for server, ranges in costs.items()}


def best_move(
    giver: str,
    homes: Sequence[Homes],
    costs: Costs,
    sites: Mapping[str, Site],
    num_bytes: Sequence[int],
    resting: Collection[int] = (),
) -> Move | None:
    """The move that relieves this server most; None if none is worth it."""
    options = list(_moves(giver, homes, costs, sites, num_bytes, resting))
    if not options:
        return None
    least = min(move.after for move in options)
    alike = [move for move in options if move.after <= least + _ALIKE]
    return min(alike, key=lambda move: (move.num_bytes, move.after, move.number, move.taker))


def _moves(
    giver: str,
    homes: Sequence[Homes],
    costs: Costs,
    sites: Mapping[str, Site],
    num_bytes: Sequence[int],
    resting: Collection[int],
) -> Iterator[Move]:
    loads, room = loads_of(costs), _room_of(homes, sites, num_bytes)
    for number, cost in costs[giver].items():
        if number in resting or giver not in homes[number] or cost <= 0:
            continue
        rank = homes[number].index(giver)
        others = [home for home in homes[number] if home != giver]
        banned = banned_beside(others, sites)
        for taker in loads:
            if taker in others:
                # Only a primary has something to gain by changing places, and its backup keeps what it has.
                given, brought = cost - costs[taker].get(number, 0.0), 0
                is_allowed = rank == 0
            else:
                given, brought = cost, num_bytes[number]
                is_allowed = taker != giver and taker not in banned and room[taker] >= brought
            after = max(loads[giver] - given, loads[taker] + given)
            if is_allowed and after <= loads[giver] - LEAST_GAIN:
                moved = _moved(homes[number], giver, taker)
                yield Move(number, giver, taker, moved, loads[giver], after, brought)


def _moved(homes: Homes, giver: str, taker: str) -> Homes:
    """The taker has the place of the giver, which has that of the taker if it had one."""
    places = {giver: taker, taker: giver}
    return tuple(places.get(home, home) for home in homes)


def _room_of(homes: Sequence[Homes], sites: Mapping[str, Site], num_bytes: Sequence[int]) -> dict[str, float]:
    """How many more bytes each server may hold; who has less than its part may take any range."""
    held = dict.fromkeys(sites, 0)
    for number, taken in enumerate(homes):
        for home in taken:
            held[home] = held.get(home, 0) + num_bytes[number]
    total, strength = sum(held.values()), sum(site.capacity for site in sites.values())
    parts = {name: total * site.capacity / strength for name, site in sites.items()}
    return {name: math.inf if held[name] < part else MOST_BYTES * part - held[name] for name, part in parts.items()}


class Rests:
    """Ranges that moved, and rest for a while: `REST` rounds after their first move, twice as long after each further
    one, up to `LONGEST`. `num_moves` is what is remembered of them."""

    REST = 10
    LONGEST = 640

    def __init__(self, num_moves: Mapping[int, int] | None = None) -> None:
        self.num_moves = dict(num_moves or {})
        self._round = 0
        self._moved = dict.fromkeys(self.num_moves, 0)

    def tick(self) -> None:
        """One more round was measured."""
        self._round += 1

    def moved(self, number: int) -> None:
        self.num_moves[number] = self.num_moves.get(number, 0) + 1
        self._moved[number] = self._round

    def resting(self) -> set[int]:
        return {number for number, since in self._moved.items() if self._round - since < self._rest_of(number)}

    def _rest_of(self, number: int) -> int:
        return min(self.REST << min(self.num_moves[number] - 1, 16), self.LONGEST)
