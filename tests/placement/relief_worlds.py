"""Servers whose ranges cost what they cost: a world in which hot ones are relieved, from a seed."""

from __future__ import annotations

import random
from collections import Counter

from paceline.placement.gauge import LoadWindow
from paceline.placement.placing import Homes, Site, place
from paceline.placement.relief import RangeMove, best_move, loads_of
from paceline.placement.relieving import CannotRelieve, Relieving


class ReliefWorld:
    """`work` is what each range has to do, `slowness` how long each server takes for it; a backup has `backup_part` of
    what its primary has. Every measurement is off by `noise`."""

    def __init__(self, seed: int, *, noise: float | None = None, skew: float | None = None) -> None:
        draw = self.random = random.Random(seed)
        num_servers = draw.randint(2, 6)
        num_replicas = draw.choice([1, 1, 2, 2, 3])
        self.num_bytes = [draw.choice([1, 1, 1, 2]) * 1000 for _ in range(draw.choice([6, 20, 64, 100, 400]))]
        self.sites = {f"s{number}": Site(draw.choice([1.0, 1.0, 2.0]), f"h{number}") for number in range(num_servers)}
        exponent = draw.choice([0.0, 0.6, 1.0, 1.4]) if skew is None else skew
        self.work = [draw.uniform(0.9, 1.1) / (1 + rank) ** exponent for rank in range(len(self.num_bytes))]
        draw.shuffle(self.work)
        # What was declared is true, but for machines that have neighbours.
        self.slowness = {
            name: (draw.choice([1.0, 1.0, 1.0, 2.0, 4.0]) if skew is None else 1.0) / site.capacity
            for name, site in self.sites.items()
        }
        self.backup_part = draw.choice([0.0, 0.3, 0.7])
        self.noise = draw.choice([0.0, 0.02, 0.1]) if noise is None else noise
        self.homes: list[Homes] = place([float(size) for size in self.num_bytes], self.sites, num_replicas)
        self.first_homes = list(self.homes)
        self.relieving = Relieving()
        self.moves: list[RangeMove] = []
        self.stuck: list[CannotRelieve] = []
        self._windows = {name: LoadWindow() for name in self.sites}
        self._known: tuple[list[Homes], list[float], dict[str, dict[int, float]]] = ([], [], {})

    def true_costs(self) -> dict[str, dict[int, float]]:
        """In units of the mean load of a server."""
        if self._known[:2] == (self.homes, self.work):
            return self._known[2]
        costs: dict[str, dict[int, float]] = {name: {} for name in self.sites}
        for number, homes in enumerate(self.homes):
            for rank, home in enumerate(homes):
                part = 1.0 if rank == 0 else self.backup_part
                costs[home][number] = part * self.work[number] * self.slowness[home]
        mean = sum(loads_of(costs).values()) / len(costs)
        found = {name: {number: cost / mean for number, cost in ranges.items()} for name, ranges in costs.items()}
        self._known = (list(self.homes), list(self.work), found)
        return found

    def run_until_quiet(self, quiet_rounds: int, most_rounds: int) -> None:
        quiet = 0
        for _ in range(most_rounds):
            before = len(self.moves)
            self.run(1)
            quiet = quiet + 1 if len(self.moves) == before else 0
            if quiet == quiet_rounds:
                return
        raise AssertionError(f"ranges still move after {most_rounds} rounds")

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            self._measure()
            found = self.relieving.look(self._windows, self.homes, self.sites, self.num_bytes)
            if isinstance(found, RangeMove):
                self.moves.append(found)
                for number, homes in found.homes.items():
                    self.homes[number] = homes
                self.relieving.disturb(self._windows)
            elif found is not None:
                self.stuck.append(found)

    def _measure(self) -> None:
        pace = self.random.uniform(0.3, 1.0)  # the workers', which all servers have alike
        for name, ranges in self.true_costs().items():
            off = max(0.1, self.random.gauss(1.0, self.noise))
            costs = {number: cost * off * pace / 2 for number, cost in ranges.items()}
            self._windows[name] = LoadWindow(self._windows[name].number + 1, costs)

    # -- what came of it ---------------------------------------------------------------------------------------------

    def highest(self) -> float:
        return max(loads_of(self.true_costs()).values())

    def best_left(self, above: float) -> RangeMove | None:
        """What could still be gained, by who has more than this."""
        costs = self.true_costs()
        for name, load in loads_of(costs).items():
            if load > above:
                move = best_move(name, self.homes, costs, self.sites, self.num_bytes)
                if move is not None:
                    return move
        return None

    def num_returns(self) -> int:
        """How often a range got homes that it had before."""
        had: dict[int, set[Homes]] = {}
        count = 0
        for number, homes in ((number, homes) for move in self.moves for number, homes in move.homes.items()):
            before = had.setdefault(number, {self.first_homes[number]})
            count += homes in before
            before.add(homes)
        return count

    def most_moves_of_a_range(self) -> int:
        return max(Counter(number for move in self.moves for number in move.homes).values(), default=0)
