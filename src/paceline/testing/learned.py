"""What a model that counts its samples has learned, by the order of an epoch alone. Pure.

The loss of a batch is minus the mean of its samples' weights, and the learning rate is the global batch: an update adds
1 to the weight of each of its samples; in the last batch of an epoch, where that is smaller, as much more as it is
smaller. `counting.py` (for tests) and `chaos/oracle.py` (for real runs) both go by this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paceline.data.order import EpochOrder

Weights = npt.NDArray[np.float32]


class Learned(NamedTuple):
    """Of data of a `length`, in global batches, with the `seed` of their order."""

    length: int
    batch: int
    seed: int

    @property
    def num_leases(self) -> int:
        """Of an epoch; as many as there are steps in a synchronous training."""
        return -(-self.length // self.batch)

    def of(self, epoch: int, leases: Iterable[int]) -> Weights:
        """By how much these leases of an epoch move the weight of each sample."""
        weights: Weights = np.zeros(self.length, np.float32)
        order = EpochOrder(self.seed, epoch, self.length)
        for lease in leases:
            start = lease * self.batch
            stop = min(start + self.batch, self.length)
            weights[order.slice(start, stop)] += self.batch / (stop - start)
        return weights
