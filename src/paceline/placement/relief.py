"""Which ranges a server with too much to do gives to another: the best move, or none.

A load is what a server has to do beside the mean of all: 1.0 is that of each when all have the same. It is the sum of
what its ranges cost it, as primary or as backup, in the seconds that the server itself measured; so a machine that is
slower than it was declared has a higher load for the same ranges, and gives some away.

A move is from one server to one other, and of one range; or of several, where they are small, which together close a
third of the gap (`PART_OF_GAP`): what was predicted wrongly is put right by the next. For each of them it is what
`evolving` does anyway:

    swap      the primary and one of its backups change places: no state is moved
    hand on   another server takes the place of the primary
    replace   another server takes the place of a backup

It is worth it if the fuller of the two servers is relieved by `LEAST_GAIN` of the mean at least. It is predicted that
a range costs its new server what it cost the old one: this makes too little of a move to a faster server, which only
means that another one follows. A range that moved before rests, longer each time (`Rests`): what varies, or costs more
than predicted, is not moved to and fro.

No server is made to hold more than `MOST_BYTES` times its part by capacity, as far as the sizes of ranges are known (of
rows that are yet to come they are guessed): load moves, but memory has an end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from paceline.placement.placing import Homes, Site, banned_beside

LEAST_GAIN = 0.05
PART_OF_GAP = 1 / 3
MOST_BYTES = 1.5
_ALIKE = 0.02  # moves whose results differ by less are told apart by how many bytes they move

Costs = Mapping[str, Mapping[int, float]]  # by server, of each range that it has


class RangeMove(NamedTuple):
    """Ranges get other homes. `before` and `after` are the load of the fuller of both servers."""

    giver: str
    taker: str
    homes: dict[int, Homes]
    before: float
    after: float
    num_bytes: int = 0  # that have to be brought to the taker


class _Option(NamedTuple):
    """One range that could go: what it takes from the load of its giver, and what has to be brought to the taker."""

    number: int
    given: float
    num_bytes: int
    homes: Homes


def loads_of(costs: Costs) -> dict[str, float]:
    return {server: sum(ranges.values()) for server, ranges in costs.items()}


def best_move(
    giver: str,
    homes: Sequence[Homes],
    costs: Costs,
    sites: Mapping[str, Site],
    num_bytes: Sequence[int],
    resting: Collection[int] = (),
) -> RangeMove | None:
    """The move that relieves this server most; None if none is worth it."""
    loads, room = loads_of(costs), _room_of(homes, sites, num_bytes)
    found = []
    for taker in loads:
        gap = loads[giver] - loads[taker]
        if taker == giver or gap <= 0:
            continue
        options = [
            option
            for option in _options(giver, taker, homes, costs, sites, num_bytes)
            if option.number not in resting and 0 < option.given < gap and option.num_bytes <= room[taker]
        ]
        for chosen in (*([option] for option in options), _several(options, PART_OF_GAP * gap, room[taker])):
            given = sum(option.given for option in chosen)
            after = max(loads[giver] - given, loads[taker] + given)
            if after <= loads[giver] - LEAST_GAIN:
                moved = {option.number: option.homes for option in chosen}
                brought = sum(option.num_bytes for option in chosen)
                found.append(RangeMove(giver, taker, moved, loads[giver], after, brought))
    if not found:
        return None
    least = min(move.after for move in found)
    alike = [move for move in found if move.after <= least + _ALIKE]
    return min(alike, key=lambda move: (move.num_bytes, move.after, move.taker, sorted(move.homes)))


def _options(
    giver: str,
    taker: str,
    homes: Sequence[Homes],
    costs: Costs,
    sites: Mapping[str, Site],
    num_bytes: Sequence[int],
) -> Iterator[_Option]:
    for number, cost in costs[giver].items():
        taken = homes[number]
        if giver not in taken:
            continue
        others = [home for home in taken if home != giver]
        if taker in others:
            # Only a primary has something to gain by changing places, and its backup keeps what it has.
            if taken[0] == giver:
                yield _Option(number, cost - costs[taker].get(number, 0.0), 0, _moved(taken, giver, taker))
        elif taker not in banned_beside(others, sites):
            yield _Option(number, cost, num_bytes[number], _moved(taken, giver, taker))


def _several(options: Sequence[_Option], most: float, room: float) -> list[_Option]:
    """Those that together give no more than this, first of all those that need nothing brought."""
    chosen, given, brought = [], 0.0, 0
    for option in sorted(options, key=lambda one: (one.num_bytes > 0, -one.given, one.number)):
        if given + option.given <= most and brought + option.num_bytes <= room:
            chosen.append(option)
            given, brought = given + option.given, brought + option.num_bytes
    return chosen


def _moved(homes: Homes, giver: str, taker: str) -> Homes:
    """The taker has the place of the giver, which has that of the taker if it had one."""
    places = {giver: taker, taker: giver}
    return tuple(places.get(home, home) for home in homes)


def _room_of(homes: Sequence[Homes], sites: Mapping[str, Site], num_bytes: Sequence[int]) -> dict[str, float]:
    """How many more bytes each server may hold."""
    held = dict.fromkeys(sites, 0)
    for number, taken in enumerate(homes):
        for home in taken:
            held[home] = held.get(home, 0) + num_bytes[number]
    total, strength = sum(held.values()), sum(site.capacity for site in sites.values())
    parts = {name: total * site.capacity / strength for name, site in sites.items()}
    return {name: MOST_BYTES * part - held[name] for name, part in parts.items()}


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

    def moved(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.num_moves[number] = self.num_moves.get(number, 0) + 1
            self._moved[number] = self._round

    def resting(self) -> set[int]:
        return {number for number, since in self._moved.items() if self._round - since < self._rest_of(number)}

    def _rest_of(self, number: int) -> int:
        return min(self.REST << min(self.num_moves[number] - 1, 16), self.LONGEST)
