"""The fewest samples that a worker gets where shares are automatic."""

from __future__ import annotations

from typing import NamedTuple


class Minimum(NamedTuple):
    """A worker that takes part gets `fewest` samples or more. It gets `wanted` or more unless that would be more than
    an equal share: many workers and a small global batch leave fewer for each, and all take part nevertheless."""

    fewest: int = 1
    wanted: int = 1

    def of(self, total: int, num_workers: int) -> int:
        """In a global batch of `total` samples for so many workers."""
        return max(self.fewest, min(self.wanted, total // num_workers))


ANY = Minimum()

# BatchNorm raises on one sample. Why 8: PLACEHOLDER
WITH_STATISTICS = Minimum(fewest=2, wanted=8)
