"""The oracle: a model whose weights say how often each sample of each epoch was learned. Pure.

Every update adds to the weight of each of its samples (`testing/learned.py` says how much). Which samples have been
learned at a cursor follows from the order of the epochs alone, so the weights that a model must have at any cursor are
known, whoever computed what.

A second parameter has the gradient 1 in every update, and momentum: it says how many updates there were, and whether
the state of its optimizer was ever lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from paceline.testing.learned import Learned, Weights

LENGTH = 200
GLOBAL_BATCH = 16
NUM_SLOTS = 64  # epochs that have weights of their own; epoch 64 adds to those of epoch 0
NUM_WEIGHTS = NUM_SLOTS * LENGTH
ORDER_SEED = 7
PACE_LR = 2.0**-6
PACE_MOMENTUM = 0.5
TOLERANCE = 0.01

_LEARNED = Learned(LENGTH, GLOBAL_BATCH, ORDER_SEED)
NUM_LEASES = _LEARNED.num_leases

HasLease = Callable[[int, int], bool]  # (epoch, lease)


def weights_at(epoch: int, position: int = 0) -> Weights:
    """What a model must hold when the epochs before this one are done, and of this one all before the position."""
    weights: Weights = np.zeros(NUM_WEIGHTS, np.float32)
    for one in range(epoch):
        _add(weights, one, range(NUM_LEASES))
    _add(weights, epoch, range(-(-position // GLOBAL_BATCH)))
    return weights


def updates_at(epoch: int, position: int = 0) -> int:
    return epoch * NUM_LEASES + -(-position // GLOBAL_BATCH)


def weights_with(epochs: int, has_lease: HasLease) -> Weights:
    """The same for leases, of which some of the last epochs may be done."""
    weights: Weights = np.zeros(NUM_WEIGHTS, np.float32)
    for epoch in range(epochs):
        _add(weights, epoch, [lease for lease in range(NUM_LEASES) if has_lease(epoch, lease)])
    return weights


def _add(weights: Weights, epoch: int, leases: Iterable[int]) -> None:
    weights.reshape(NUM_SLOTS, LENGTH)[epoch % NUM_SLOTS] += _LEARNED.of(epoch, leases)


def num_updates(pace: float) -> float:
    """How many updates the second parameter saw; not a whole number if its momentum was lost."""
    # After t updates the sum of velocities is 2t - 2 + 2^(1-t).
    total = -pace / PACE_LR
    updates = (total + 2.0) / 2.0
    return updates if updates > 20 else _small(total)


def _small(total: float) -> float:
    velocity = reached = 0.0
    for number in range(21):
        if abs(reached - total) < TOLERANCE:
            return float(number)
        velocity = velocity * PACE_MOMENTUM + 1.0
        reached += velocity
    return (total + 2.0) / 2.0


@dataclass(frozen=True)
class Difference:
    """Samples that weigh less or more than they must, and the epochs (modulo slots) that they belong to."""

    num_missing: int
    num_extra: int
    slots: tuple[int, ...]

    def __str__(self) -> str:
        epochs = ", ".join(map(str, self.slots[:5])) + (" ..." if len(self.slots) > 5 else "")
        return f"{self.num_missing} samples missing, {self.num_extra} too often (epochs {epochs} modulo {NUM_SLOTS})"


def difference(found: Weights, low: Weights, high: Weights | None = None) -> Difference | None:
    """None if every weight is as it must be, or between the two."""
    high = low if high is None else high
    missing, extra = found < low - TOLERANCE, found > high + TOLERANCE
    if not (missing | extra).any() and np.isfinite(found).all():
        return None
    slots = sorted({int(index) // LENGTH for index in np.flatnonzero(missing | extra | ~np.isfinite(found))})
    return Difference(int(missing.sum()), int(extra.sum()), tuple(slots))
