"""Ids that have been seen, but not often enough for a row.

Most ids of a long stream come once or twice; a row for each would fill the memory with what is never trained. An id
waits here, at a few bytes, until it has been seen `admit_after` times; the next sighting admits it. Ids that are not
seen any more are forgotten by `forget`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from paceline.server.index import MAX_KEYS, KeyIndex
from paceline.server.memory import Column
from paceline.wire.memory import total_bytes


class WaitingIds:
    def __init__(self, admit_after: int) -> None:
        self._admit_after = admit_after
        self._index = KeyIndex()
        max_ids = min(MAX_KEYS, total_bytes() // 12)
        self._counts = Column(width=1, dtype=torch.int32, max_slots=max_ids, what="sightings of waiting ids")
        self._seen = Column(width=1, dtype=torch.int64, max_slots=max_ids, what="ages of waiting ids")

    @property
    def num_bytes(self) -> int:
        return self._index.num_bytes + self._counts.num_bytes + self._seen.num_bytes

    def see(self, ids: torch.Tensor, version: int) -> torch.Tensor:
        """Count a sighting of each; true where it admits the id, which then waits no longer."""
        num_slots = max(self._index.num_slots, len(self._index) + len(ids))
        self._counts.grow(num_slots)
        self._seen.grow(num_slots)
        known = self._index.find(ids) >= 0
        slots = self._index.add(ids).numpy()
        counts, seen = self._arrays()
        counts[slots] = np.where(known.numpy(), counts[slots], 0) + 1
        seen[slots] = version
        admitted = torch.from_numpy(counts[slots] > self._admit_after)
        self._remove(ids[admitted])
        return admitted

    def forget(self, older_than_version: int) -> int:
        """Drop the ids that were not seen since; how many."""
        _, seen = self._arrays()
        ages = seen[: self._index.num_slots]
        slots = np.flatnonzero((ages >= 0) & (ages < older_than_version))
        self._remove(self._index.keys_of(torch.from_numpy(slots)))
        return len(slots)

    def _remove(self, ids: torch.Tensor) -> None:
        _, seen = self._arrays()
        seen[self._index.remove(ids).numpy()] = -1

    def _arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        return self._counts.tensor.view(-1).numpy(), self._seen.tensor.view(-1).numpy()
