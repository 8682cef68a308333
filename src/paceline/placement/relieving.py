"""Hot servers are relieved, one move after the other: what the coordinator keeps of it between two looks.

`look` is given the newest windows while all ranges are where they should be, and says what to move next; `disturb` is
called while anything moves. So there is at most one move at a time, each is measured before the next, and none is made
while servers come or go.

What cannot be helped is said once: a server whose load is that of one range, which can be moved but not shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from paceline.placement.gauge import Gauge, LoadWindow
from paceline.placement.placing import Homes, Site
from paceline.placement.relief import RangeMove, Rests, best_move, loads_of

COLD = 0.1  # a range with nothing to do counts as this part of what its bytes would


class CannotRelieve(NamedTuple):
    """Nothing that could be moved would relieve this server; `number` is what costs it most."""

    server: str
    load: float
    number: int
    cost: float


class Relieving:
    """`num_moves` and `work` are what is remembered of it: how often ranges moved, and what each has to do."""

    def __init__(self, num_moves: Mapping[int, int] | None = None, work: Sequence[float] = ()) -> None:
        self.work = tuple(work)
        self._gauge = Gauge(is_relieving=bool(num_moves))  # as it may have been when the last coordinator ended
        self._rests = Rests(num_moves)
        self._told: set[str] = set()
        self._homes: Sequence[Homes] = ()
        self._sites: Mapping[str, Site] = {}

    @property
    def num_moves(self) -> dict[int, int]:
        return dict(self._rests.num_moves)

    def disturb(self, windows: Mapping[str, LoadWindow]) -> None:
        self._learn()
        self._gauge.restart(windows)

    def look(
        self,
        windows: Mapping[str, LoadWindow],
        homes: Sequence[Homes],
        sites: Mapping[str, Site],
        num_bytes: Sequence[int],
    ) -> RangeMove | CannotRelieve | None:
        """What follows from these windows, of all `sites`."""
        if sites.keys() != self._sites.keys():
            self._told.clear()
        self._homes, self._sites = homes, sites
        if not self._gauge.take(windows):
            return None
        self._rests.tick()
        hot = self._gauge.hot()
        if not hot:
            self._gauge.is_relieving = self._gauge.is_relieving and not self._gauge.is_known
            return None
        costs, resting = self._gauge.costs(), self._rests.resting()
        for server in hot:
            move = best_move(server, homes, costs, sites, num_bytes, resting)
            if move is not None:
                self._learn()
                self._rests.moved(move.homes)
                self._gauge.is_relieving = True
                self._told.clear()
                return move
        stuck = [server for server in hot if server not in self._told and not resting & costs[server].keys()]
        return self._stuck(stuck[0], costs[stuck[0]], loads_of(costs)[stuck[0]]) if stuck else None

    def _stuck(self, server: str, costs: Mapping[int, float], load: float) -> CannotRelieve:
        self._told.add(server)
        number = max(costs, key=lambda one: (costs[one], -one))
        return CannotRelieve(server, load, number, costs[number])

    def _learn(self) -> None:
        """What each range has to do. A strong server needs less time for the same, so its capacity counts."""
        if self._gauge.is_known:
            costs, sites = self._gauge.costs(), self._sites
            self.work = tuple(
                costs[home[0]].get(number, 0.0) * sites[home[0]].capacity for number, home in enumerate(self._homes)
            )

    def weights(self, num_bytes: Sequence[int]) -> list[float]:
        """What ranges are placed by when servers come or go: by what they have to do, if that is known."""
        self._learn()
        total_work, total_bytes = sum(self.work), sum(num_bytes)
        if len(self.work) != len(num_bytes) or not total_work > 0 or not total_bytes:
            return [float(size) for size in num_bytes]
        return [
            max(work / total_work, COLD * size / total_bytes) for work, size in zip(self.work, num_bytes, strict=True)
        ]
