"""What ranges cost the servers of the simulation: some are hot, some machines are slow, and both may change.

Some of all worlds have loads; in the others nothing is measured, as in a run whose servers are idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.placement.placement import Placement
from paceline.placement.placing import Homes, Site
from paceline.placement.relief import best_move, loads_of

if TYPE_CHECKING:
    from paceline.testing.joint.world import World

BACKUP = 0.4  # of what a range costs its primary
TOLERATED = 1.3  # a load up to which nothing has to move
OFTEN = 3  # a range that moved so often rests longer than the simulation lasts


class Loads:
    def __init__(self, world: World) -> None:
        self._world = world
        self.are_measured = world.is_served and (world.mutation.is_about_load or world.random.random() < 0.4)
        self.num_changes = 0
        self._work: list[float] = []
        self._slowness: dict[str, float] = {}
        self.change()

    def change(self) -> None:
        """Other ranges are hot, other machines are slow."""
        draw = self._world.random
        self.num_changes += 1
        self._work = [draw.choice([0.06, 0.12, 0.5]) for _ in range(self._world.num_ranges)]
        self._slowness = {}

    def costs_on(self, server: str, placement: Placement) -> dict[int, float]:
        """Of the ranges that a server has by the placement it knows."""
        if not self.are_measured:
            return {}
        if server not in self._slowness:
            self._slowness[server] = self._world.random.choice([1.0, 1.0, 1.0, 3.0])
        return {
            number: self._work[number] * self._slowness[server] * (1.0 if one.primary.server == server else BACKUP)
            for number, one in enumerate(placement.ranges)
            if one.of(server) is not None
        }

    def is_level(self, placement: Placement, names: list[str], num_moves: dict[int, int]) -> bool:
        """Whether nobody has too much, or nothing could be done about it."""
        if not self.are_measured or not names:
            return True
        found = {name: self.costs_on(name, placement) for name in names}
        loads = loads_of(found)
        mean = sum(loads.values()) / len(loads)
        if not mean:
            return True
        costs = {name: {number: cost / mean for number, cost in mine.items()} for name, mine in found.items()}
        homes: list[Homes] = [
            tuple(one.server for one in (replicas.primary, *replicas.backups)) for replicas in placement.ranges
        ]
        often = {number for number, count in num_moves.items() if count >= OFTEN}
        sites = {name: Site(1.0, self._world.servers[name].host) for name in names}
        sizes = [1] * len(homes)
        return not any(
            loads[name] > TOLERATED * mean and best_move(name, homes, costs, sites, sizes, often) is not None
            for name in names
        )
