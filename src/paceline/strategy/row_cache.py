"""Rows that a worker has pulled not long ago, used again for a while: those of frequent ids are in every batch.

A row is used for at most `staleness` steps after it was pulled; its own updates, and those of others, are not seen in
it meanwhile. So a training with it is not that of one process to rounding, and says so by asking for it.
"""

from __future__ import annotations

import threading

import torch

from paceline.server.index import KeyIndex

MOST_ROWS = 1 << 20
_FIRST_ROWS = 1 << 12


class RowCache:
    def __init__(self, dim: int, dtype: torch.dtype, staleness: int) -> None:
        self._dim = dim
        self._dtype = dtype
        self._staleness = staleness
        self._lock = threading.Lock()  # rows for the next batch are looked up on another thread
        self._forget()

    def _forget(self) -> None:
        self._index = KeyIndex()
        self._rows = torch.empty((_FIRST_ROWS, self._dim), dtype=self._dtype)
        self._pulled_at = torch.empty(_FIRST_ROWS, dtype=torch.int64)

    def take(self, ids: torch.Tensor, now: int, out: torch.Tensor) -> torch.Tensor:
        """Write what is here, and recent enough, into `out`; the positions of the ids that have to be pulled."""
        with self._lock:
            return self._take(ids, now, out)

    def put(self, ids: torch.Tensor, rows: torch.Tensor, now: int) -> None:
        with self._lock:
            self._put(ids, rows, now)

    def _take(self, ids: torch.Tensor, now: int, out: torch.Tensor) -> torch.Tensor:
        slots = self._index.find(ids)
        known = (slots >= 0).nonzero().view(-1)
        recent = known[self._pulled_at[slots[known]] >= now - self._staleness]
        out[recent] = self._rows[slots[recent]]
        missing = torch.ones(len(ids), dtype=torch.bool)
        missing[recent] = False
        return missing.nonzero().view(-1)

    def _put(self, ids: torch.Tensor, rows: torch.Tensor, now: int) -> None:
        if len(self._index) + len(ids) > MOST_ROWS:
            self._forget()  # what is frequent is back soon
        slots = self._index.add(ids)
        size = len(self._pulled_at)
        if self._index.num_slots > size:
            size = max(2 * size, self._index.num_slots)
            self._rows = torch.cat([self._rows, torch.empty((size - len(self._rows), self._dim), dtype=self._dtype)])
            more = torch.empty(size - len(self._pulled_at), dtype=torch.int64)
            self._pulled_at = torch.cat([self._pulled_at, more])
        self._rows[slots] = rows
        self._pulled_at[slots] = now
