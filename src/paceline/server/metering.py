"""What the ranges of a server cost it, in seconds of work a second.

One request concerns many ranges and is done in one go. Its time is shared out by the bytes that it touches of each: of
dense ranges those pushed and pulled, of tables those of the rows. What a step stages is only kept at first; the time of
its commit goes to the ranges by what was staged for them. State that is loaded, moved or saved is no work of a range:
it comes once.

The time is that of the clock, not of the processor: on a machine with a noisy neighbour the same work takes longer, and
that is what shall be seen.

To look into a request costs time itself, so that is done with one in four, chosen at random; the time of the others is
shared out as theirs was.

A *window* ends after `WINDOW_S` with `FEWEST` requests, or after `LONGEST_S` with fewer: where steps take long, a short
one would have a step or none.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch

from paceline.server.messages import CommitStep, Load, Push, StageStep
from paceline.server.parcels import Parcel, Partitions, TableRows

WINDOW_S = 1.0
FEWEST = 16
LONGEST_S = 10.0
_MOST_IDS = 2048  # of a request that are looked at, to know which ranges they belong to

Bytes = Mapping[int, float]  # by range


class LoadMeasured(NamedTuple):
    """The last window that ended: its number, the part of it that the server was busy, the cost of each range."""

    number: int = 0
    busy: float = 0.0
    costs: Mapping[int, float] = {}


class Meter:
    """For any thread. `clock` is in seconds; `part` of the requests are looked into."""

    def __init__(self, clock: Callable[[], float], part: float = 0.25) -> None:
        self._clock = clock
        self._part = part
        self._dice = random.Random(0)
        self._lock = threading.Lock()
        self._began = clock()
        self._num_requests = 0
        self._busy_s = 0.0
        self._seconds: dict[int, float] = {}
        self._others_s = 0.0  # of requests that were not looked into
        self._staged: dict[int, float] = {}  # the bytes that wait for their commit
        self._last = LoadMeasured()

    def add(
        self,
        seconds: float,
        ranges: Collection[int],
        parcel: Parcel,
        partitions: Partitions | None,
        *,
        push: Push | None = None,
        commit: CommitStep | None = None,
    ) -> None:
        """So long it took to do this."""
        is_chosen = self._dice.random() < self._part
        touched = touched_bytes(ranges, parcel, partitions) if is_chosen else {}
        with self._lock:
            self._busy_s += seconds
            self._num_requests += 1
            if commit is not None:
                for number in self._staged.keys() & set(ranges):
                    touched[number] = touched.get(number, 0.0) + self._staged.pop(number)
            if isinstance(push, StageStep):
                for number, size in touched.items():
                    self._staged[number] = self._staged.get(number, 0.0) + size
            if isinstance(push, Load):
                return
            if touched:
                self._share_out(seconds, touched)
            else:
                self._others_s += seconds

    def add_other(self, seconds: float) -> None:
        """So long it took to do what is no work of any range."""
        with self._lock:
            self._busy_s += seconds

    def _share_out(self, seconds: float, touched: Bytes) -> None:
        total = sum(touched.values())
        for number, size in touched.items():
            if total > 0:
                self._seconds[number] = self._seconds.get(number, 0.0) + seconds * size / total

    def look(self) -> LoadMeasured:
        """What the last window found."""
        with self._lock:
            elapsed_s = self._clock() - self._began
            if elapsed_s >= LONGEST_S or (elapsed_s >= WINDOW_S and self._num_requests >= FEWEST):
                self._share_out(self._others_s, dict(self._seconds))
                costs = {number: seconds / elapsed_s for number, seconds in self._seconds.items()}
                self._last = LoadMeasured(self._last.number + 1, min(1.0, self._busy_s / elapsed_s), costs)
                self._began += elapsed_s
                self._busy_s, self._others_s, self._num_requests, self._seconds = 0.0, 0.0, 0, {}
            return self._last


def touched_bytes(ranges: Collection[int], parcel: Parcel, partitions: Partitions | None) -> dict[int, float]:
    """How many bytes of each of these ranges a parcel pushes and wants."""
    found: dict[int, float] = {}
    mine, detail = set(ranges), parcel.detail
    for slices, tensors in ((detail.dense, parcel.tensors), (detail.wants, parcel.wanted)):
        for where in slices:
            if where.number in mine and where.tensor < len(tensors):
                size = where.length * tensors[where.tensor].itemsize
                found[where.number] = found.get(where.number, 0.0) + size
    if partitions is not None:
        for rows in detail.rows:
            _add_rows(found, mine, rows, parcel, parcel.tensors, partitions)
        for rows in detail.row_wants:
            _add_rows(found, mine, rows, parcel, parcel.wanted, partitions)
    return found


def _add_rows(
    found: dict[int, float],
    mine: Collection[int],
    rows: TableRows,
    parcel: Parcel,
    tensors: list[torch.Tensor],
    partitions: Partitions,
) -> None:
    if max(rows.ids + 1 - len(parcel.tensors), rows.rows + 1 - len(tensors)) > 0 or not len(parcel.tensors[rows.ids]):
        return  # a replica is not sent what the worker wants to know
    ids = parcel.tensors[rows.ids]
    every = -(-len(ids) // _MOST_IDS)
    counts = torch.bincount(partitions.of(ids[::every]) - partitions.first, minlength=partitions.count).tolist()
    row_bytes = tensors[rows.rows].nbytes / len(ids)
    for offset, count in enumerate(counts):
        if count and partitions.first + offset in mine:
            number = partitions.first + offset
            found[number] = found.get(number, 0.0) + count * every * row_bytes
