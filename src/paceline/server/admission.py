"""Ids that have been seen, but not often enough for a row.

Most ids of a long stream come once or twice; a row for each would fill the memory with what is never trained. An id
waits here, at a few bytes, until it has been seen `admit_after` times; the next sighting admits it. A sighting is a
gradient that was pushed: pulls are seen by the primary of a range alone, and all replicas must admit alike. For the
same reason ids that wait travel with the rows. With `evict_after` an id that was not seen for so many updates begins
anew, as a row does; see `ages`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.server.ages import Clocks, Sweeper
from paceline.server.chunk import WaitingChunkIds
from paceline.server.index import MAX_KEYS, KeyIndex
from paceline.server.memory import Column, Slots
from paceline.wire.memory import total_bytes


class WaitingIds:
    def __init__(self, admit_after: int, evict_after: int, clocks: Clocks) -> None:
        self._admit_after = admit_after
        self._evict_after = evict_after
        self._clocks = clocks
        self._sweeper = Sweeper(evict_after)
        self._index = KeyIndex()
        max_ids = min(MAX_KEYS, total_bytes() // 12)
        self._counts = Column(width=1, dtype=torch.int32, max_slots=max_ids, what="sightings of waiting ids")
        self._seen = Column(width=1, dtype=torch.int64, max_slots=max_ids, what="ages of waiting ids")
        self._count_array: npt.NDArray[np.int32] = self._counts.tensor.view(-1).numpy()
        self._seen_array: npt.NDArray[np.int64] = self._seen.tensor.view(-1).numpy()

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes + self._counts.num_bytes + self._seen.num_bytes

    def see(self, ids: torch.Tensor) -> torch.Tensor:
        """Count a sighting of each; true where it admits the id, which then waits no longer."""
        known = (self._index.find(ids) >= 0).numpy()
        slots, now = self._add(ids), self._clocks.of(ids)
        counted = known & ~self._are_old(slots, ids)
        self._count_array[slots] = np.where(counted, self._count_array[slots], 0) + 1
        self._seen_array[slots] = now
        admitted = torch.from_numpy(self._count_array[slots] > self._admit_after)
        self._index.remove(ids[admitted])
        return admitted

    def sweep(self) -> None:
        """Clear away some of those that will begin anew anyway."""
        slots, ids = self._those_of(*self._sweeper.next_part(self._index.num_slots))
        self._index.remove(ids[torch.from_numpy(self._are_old(slots, ids))])

    def drop(self, ids: torch.Tensor) -> None:
        self._index.remove(ids)

    def export(self) -> WaitingChunkIds:
        slots, ids = self._those_of(0, self._index.num_slots)
        young = ~self._are_old(slots, ids)
        slots, ids = slots[young], ids[torch.from_numpy(young)]
        idle = np.maximum(self._clocks.of(ids) - self._seen_array[slots], 0)
        return WaitingChunkIds(ids, torch.from_numpy(self._count_array[slots]), torch.from_numpy(idle))

    def load(self, waiting: WaitingChunkIds) -> None:
        slots = self._add(waiting.ids)
        self._count_array[slots] = waiting.counts.numpy()
        self._seen_array[slots] = self._clocks.of(waiting.ids) - waiting.idle.numpy()

    def _add(self, ids: torch.Tensor) -> Slots:
        num_slots = max(self._index.num_slots, len(self._index) + len(ids))
        self._counts.grow(num_slots)
        self._seen.grow(num_slots)
        slots: Slots = self._index.add(ids).numpy()
        return slots

    def all_ids(self) -> torch.Tensor:
        """Also of those that will begin anew."""
        return self._those_of(0, self._index.num_slots)[1]

    def _those_of(self, start: int, stop: int) -> tuple[Slots, torch.Tensor]:
        """The slots in use between these, and their ids."""
        places = torch.arange(start, stop)
        ids = self._index.keys_of(places)
        slots = self._index.find(ids)
        used = slots == places  # of a slot that is free the key may be anywhere, or nowhere
        return slots[used].numpy(), ids[used]

    def _are_old(self, slots: Slots, ids: torch.Tensor) -> npt.NDArray[np.bool_]:
        if not self._evict_after:
            return np.zeros(len(slots), dtype=np.bool_)
        old: npt.NDArray[np.bool_] = self._clocks.of(ids) - self._seen_array[slots] >= self._evict_after
        return old
