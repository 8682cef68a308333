"""Which rows have not been touched for so long that they are dropped.

A row is *touched* by the update that has its gradient. It is *old* when `evict_after` more updates (steps, or leases)
have been made without it: then it is taken for gone, whether it is still in memory or not, and comes back as a new
row. Only looks at what every replica of a range has alike decide that:

    clock     of a range: the number of the newest update that was applied to it; it travels with the range
    touched   of a row: what the clock of its range showed after the update that touched it last

So all replicas agree on which rows are old at any update, although each clears them away when it comes to it: those
that it meets in a pull or a push at once, the others by and by, some slots with every update. A pull touches nothing,
because only the primary sees it; a row that a pull made, and nobody pushed, is worth as much as none.

Clocks do not go back: a lease that comes late is an update of the present. Where a range is loaded, rows are as long
idle as they were when they were saved, whatever the clock shows now.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from paceline.server.memory import Column, Slots
from paceline.server.parcels import Partitions

Numbers = npt.NDArray[np.int64]

# Slots looked at with an update: at least so many, and so many that all are seen within a quarter of a row's life.
_FEWEST_SWEPT = 1024
_MOST_SWEPT = 65_536


class Clocks:
    """One for each range that holds rows; one for all ids where there are no ranges."""

    def __init__(self, partitions: Partitions | None = None) -> None:
        self._partitions = partitions
        self._numbers = np.zeros(partitions.count if partitions is not None else 1, dtype=np.int64)

    def of(self, ids: torch.Tensor) -> Numbers:
        if self._partitions is None:
            return np.broadcast_to(self._numbers, len(ids))
        found: Numbers = self._numbers[self._partitions.of(ids).numpy() - self._partitions.first]
        return found

    @property
    def newest(self) -> int:
        return int(self._numbers.max())

    def at(self, ranges: Iterable[int]) -> int:
        """The newest of these."""
        return int(self._numbers[self._places(ranges)].max(initial=0))

    def start(self, ranges: Iterable[int], number: int) -> None:
        """These were loaded, as of that update."""
        self._numbers[self._places(ranges)] = number

    def move_on(self, ranges: Iterable[int], number: int) -> None:
        """An update was applied to these."""
        places = self._places(ranges)
        self._numbers[places] = np.maximum(self._numbers[places], number)

    def _places(self, ranges: Iterable[int]) -> list[int]:
        if self._partitions is None:
            return [0]
        return [number - self._partitions.first for number in ranges if self._partitions.has(number)]


class Sweeper:
    """Goes through all slots, a part with every update."""

    def __init__(self, evict_after: int) -> None:
        self._evict_after = evict_after
        self._next = 0

    def next_part(self, num_slots: int) -> tuple[int, int]:
        start = min(self._next, num_slots)
        wanted = min(max(_FEWEST_SWEPT, 4 * num_slots // self._evict_after), _MOST_SWEPT)
        stop = min(start + wanted, num_slots)
        self._next = stop if stop < num_slots else 0
        return start, stop


class Ages:
    """Those of the rows of one table, by slot."""

    def __init__(self, evict_after: int, clocks: Clocks, max_rows: int, what: str) -> None:
        self._evict_after = evict_after
        self._clocks = clocks
        self.column = Column(width=1, dtype=torch.int64, max_slots=max_rows, what=what)
        self._touched: Numbers = self.column.tensor.view(-1).numpy()
        self._sweeper = Sweeper(evict_after)

    def touch(self, slots: Slots, ids: torch.Tensor, number: int = 0) -> None:
        """They are touched by the update of this number, which has not been counted yet."""
        self._touched[slots] = np.maximum(self._clocks.of(ids), number)

    def put(self, slots: Slots, ids: torch.Tensor, idle: Numbers) -> None:
        """They come from elsewhere, and have been idle for so many updates."""
        self._touched[slots] = self._clocks.of(ids) - idle

    def idle(self, slots: Slots, ids: torch.Tensor) -> Numbers:
        idle: Numbers = np.maximum(self._clocks.of(ids) - self._touched[slots], 0)
        return idle

    def are_old(self, slots: Slots, ids: torch.Tensor) -> npt.NDArray[np.bool_]:
        old: npt.NDArray[np.bool_] = self._clocks.of(ids) - self._touched[slots] >= self._evict_after
        return old

    def next_part(self, num_slots: int) -> Slots:
        """Slots of the part that is swept next which may have an old row, or be free."""
        start, stop = self._sweeper.next_part(num_slots)
        found: Slots = np.flatnonzero(self._clocks.newest - self._touched[start:stop] >= self._evict_after) + start
        return found
