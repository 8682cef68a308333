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

# BatchNorm raises on one sample. Why 4 are wanted (benchmarks.batch_norm, 12 seeds, global batch of 32): where a
# layer gets one value a sample, a worker with 2 samples cost 9.7 points of accuracy (± 3.6), one with 3 to 8
# between 0.6 and 1.4 (± 0.4), not in the order of their shares, and 3 was worse than 4. After convolutions it
# was 0.2 less to 0.9 more, in no order either. So 2 is too few, and that more than 4 would be better was not
# shown, while it makes the slowest worker slower still. `batch_norm="sync"` is for those to whom the rest matters.
WITH_STATISTICS = Minimum(fewest=2, wanted=4)
