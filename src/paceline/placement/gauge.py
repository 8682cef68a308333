"""Whether a server has more to do than the others, for good and not by chance.

Each server measures in *windows*, which it numbers: seconds of work in a second, for each of its ranges. A *round* is
one new window of every server. In a round what counts is how the servers compare, so it is divided by their mean: when
the workers pause, or all work twice as fast, nothing follows.

A server is *hot* if in `LEAST` rounds or more since ranges last moved

- its load is above the mean by `ENTER` (by `LEAVE` once ranges are being given away, so that one hot server is brought
  all the way down, and none is touched because it is a little above),
- it was so in each of the last `SUSTAINED` rounds, and
- that is more than its rounds can feign: `SURE` times the error of their mean, as their spread tells it.

Rounds in which nobody has anything to do (`IDLE`) do not count. When ranges move, or other servers are there, it is
measured from the beginning; windows that began before are left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

ENTER = 0.25
LEAVE = 0.10
LEAST = 5
KEPT = 16
SUSTAINED = 3
SURE = 4.0
IDLE = 0.05  # of its time, that even the busiest server is busy


class LoadWindow(NamedTuple):
    """What a server measured: its number, and the seconds of work in a second, by range."""

    number: int = 0
    costs: Mapping[int, float] = {}


class Gauge:
    """`is_relieving` says that ranges are being given away, until nobody is hot any more."""

    def __init__(self, *, is_relieving: bool = False) -> None:
        self.is_relieving = is_relieving
        self._since: dict[str, int] = {}  # the number of the last window that counted, or was left out
        self._rounds: deque[dict[str, dict[int, float]]] = deque(maxlen=KEPT)

    def restart(self, windows: Mapping[str, LoadWindow]) -> None:
        """Ranges move: what is being measured now is of no use."""
        self._since = {server: window.number + 1 for server, window in windows.items()}
        self._rounds.clear()

    def take(self, windows: Mapping[str, LoadWindow]) -> bool:
        """The newest windows; whether they make a new round that counts."""
        if windows.keys() != self._since.keys():
            self.restart(windows)
        if any(window.number <= self._since[server] for server, window in windows.items()):
            return False
        self._since = {server: window.number for server, window in windows.items()}
        loads = [sum(window.costs.values()) for window in windows.values()]
        if max(loads, default=0.0) < IDLE:
            return False
        mean = sum(loads) / len(loads)
        self._rounds.append(
            {
                server: {number: cost / mean for number, cost in window.costs.items()}
                for server, window in windows.items()
            }
        )
        return True

    @property
    def is_known(self) -> bool:
        return len(self._rounds) >= LEAST

    def costs(self) -> dict[str, dict[int, float]]:
        """Of each range on each server, the mean over the rounds."""
        found: dict[str, dict[int, float]] = {}
        for one in self._rounds:
            for server, ranges in one.items():
                sums = found.setdefault(server, {})
                for number, cost in ranges.items():
                    sums[number] = sums.get(number, 0.0) + cost / len(self._rounds)
        return found

    def hot(self) -> list[str]:
        """The servers that are, the hottest first."""
        if not self.is_known:
            return []
        above = ENTER if not self.is_relieving else LEAVE
        found = []
        for server in self._since:
            loads = [sum(one[server].values()) for one in self._rounds]
            mean = sum(loads) / len(loads)
            spread = math.sqrt(sum((load - mean) ** 2 for load in loads) / (len(loads) - 1))
            is_sustained = all(load > 1 + above for load in loads[-SUSTAINED:])
            if is_sustained and mean - 1 > max(above, _doubt(spread, len(loads))):
                found.append((-mean, server))
        return [server for _, server in sorted(found)]


def _doubt(spread: float, num_rounds: int) -> float:
    """How far off the mean of so many rounds may be; a spread that few of them tell may be too small by chance."""
    return SURE * (1 + 4 / num_rounds) * spread / math.sqrt(num_rounds)
