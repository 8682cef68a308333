"""The order of an epoch: a pure function of (seed, epoch, length), computed only for the slice at hand.

Promises:
- Every machine gets the same numbers: integer arithmetic only, no generator of numpy, torch or Python takes part.
- `EpochOrder` needs no memory and no time to begin, whatever the length.
- The built-in order is a permutation: each sample once an epoch.

How it shuffles: a generalized Feistel network (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A
position is written as (left, right) on a grid of `rows` x `columns` cells that is barely larger than the epoch. Each
round adds a keyed hash of one coordinate to the other; it can be undone, so the whole is a permutation of the grid.
A position that lands outside of the epoch goes through the network again until it lands inside (cycle walking), which
is a permutation of the epoch. The grid has fewer than `sqrt(length) + 1` cells too many, so that this is rare.
It is made to look random, not to keep a secret.

A user's own order is a function that returns the indices of a whole epoch. It is called once an epoch. Its length,
and the range of what it gives, are checked; it may name a sample twice, which is then trained on twice.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
# (seed, epoch, length) -> something with len() that can be sliced: a list, a range, an array or a tensor of integers.
Order = Callable[[int, int, int], Any]

# Pairs of rounds, one for each coordinate.
_NUM_PAIRS = 4
_AT_ONCE = 2048  # positions: of fewer, numpy's calls cost more than the numbers
_MOST_KEPT = 256  # slices that were computed ahead
_TOLD = 4096  # positions by which a script's own order is told from another


class EpochOrder:
    """The built-in order of one epoch: shuffled, or 0, 1, 2, ... with `shuffle=False`."""

    def __init__(self, seed: int, epoch: int, length: int, shuffle: bool = True) -> None:
        if length < 0:
            raise ValueError(f"length={length}: an epoch has 0 samples or more")
        self._length = length
        self._keys = _round_keys(seed, epoch) if shuffle else None
        self._rows = math.isqrt(max(length - 1, 0)) + 1
        self._columns = max(1, -(-length // self._rows))

    def __len__(self) -> int:
        return self._length

    def slice(self, start: int, stop: int) -> Indices:
        """The indices of the samples at positions start..stop-1."""
        _check_slice(start, stop, self._length)
        return self._at(np.arange(start, stop, dtype=np.uint64))

    def slices(self, start: int, stop: int, stride: int, count: int) -> list[Indices]:
        """The slices start..stop, start + stride..stop + stride, ... `count` of them: as `slice` has each."""
        _check_slice(start, stop + stride * (count - 1), self._length)
        positions = np.concatenate(
            [np.arange(start, stop, dtype=np.uint64) + np.uint64(number * stride) for number in range(count)]
        )
        return np.split(self._at(positions), count)

    def _at(self, positions: npt.NDArray[np.uint64]) -> Indices:
        if self._keys is None:
            return positions.astype(np.int64)
        found = self._permute(positions)
        while (outside := np.flatnonzero(found >= self._length)).size:
            found[outside] = self._permute(found[outside])
        return found.astype(np.int64)

    def _permute(self, cells: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass through the network: a permutation of the grid's cells."""
        assert self._keys is not None
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        left, right = cells // columns, cells % columns
        for left_key, right_key in self._keys:
            left = (left + _mix(right, left_key)) % rows
            right = (right + _mix(left, right_key)) % columns
        return left * columns + right


class Orders:
    """The orders of all epochs of a run: the built-in one, or the user's, asked once an epoch. Where the next slice is
    most likely the same one, `stride` positions further, several are computed at a time."""

    def __init__(
        self, *, seed: int, length: int, shuffle: bool = True, order: Order | None = None, stride: int = 0
    ) -> None:
        self._seed = seed
        self._length = length
        self._shuffle = shuffle
        self._order = order
        self._stride = stride
        self._ahead: dict[tuple[int, int, int], Indices] = {}
        # No more: a user's order may take memory in proportion to the dataset. Loader workers look into the next epoch.
        self._of_epoch = functools.lru_cache(maxsize=2)(self._make)

    def describe(self) -> str:
        """In words that are the same for the same order only. A script's own is told by how the first epoch begins."""
        if self._order is None:
            return f"shuffled by seed {self._seed}" if self._shuffle else "in the order of the data"
        beginning = self.slice(0, 0, min(self._length, _TOLD))
        return f"in the script's own order ({hashlib.sha256(beginning.tobytes()).hexdigest()[:16]})"

    def slice(self, epoch: int, start: int, stop: int) -> Indices:
        """The indices of the samples at positions start..stop-1 of the epoch."""
        found = self._ahead.get((epoch, start, stop))
        return found if found is not None else self._compute(epoch, start, stop)

    def _compute(self, epoch: int, start: int, stop: int) -> Indices:
        order = self._of_epoch(epoch)
        if not self._stride or stop <= start or isinstance(order, _GivenOrder):
            return order.slice(start, stop)
        count = min(_AT_ONCE // (stop - start), (self._length - stop) // self._stride + 1)
        if count < 2:
            return order.slice(start, stop)
        if len(self._ahead) >= _MOST_KEPT:
            self._ahead.clear()
        for number, found in enumerate(order.slices(start, stop, self._stride, count)):
            found.flags.writeable = False  # it may be given again
            self._ahead[epoch, start + number * self._stride, stop + number * self._stride] = found
        return self._ahead[epoch, start, stop]

    def _make(self, epoch: int) -> EpochOrder | _GivenOrder:
        if self._order is None:
            return EpochOrder(self._seed, epoch, self._length, self._shuffle)
        return _GivenOrder(self._order(self._seed, epoch, self._length), epoch, self._length)


class _GivenOrder:
    """What a user's order returned for one epoch, checked where it is used."""

    def __init__(self, given: Any, epoch: int, length: int) -> None:
        try:
            found = len(given)
        except TypeError:
            raise TypeError(
                f"the order returned {type(given).__name__} for epoch {epoch}, which has no length; "
                "return a list, an array or a tensor of indices"
            ) from None
        if found != length:
            raise ValueError(
                f"the order returned {found} indices for epoch {epoch} of a dataset of {length} samples; "
                "return exactly one index for each position"
            )
        self._given = given
        self._epoch = epoch
        self._length = length

    def slice(self, start: int, stop: int) -> Indices:
        _check_slice(start, stop, self._length)
        indices = np.asarray(self._given[start:stop])
        if start == stop:
            return np.empty(0, dtype=np.int64)
        if indices.dtype.kind not in "iu" or indices.ndim != 1:
            raise TypeError(
                f"the order of epoch {self._epoch} holds {indices.dtype} of shape {indices.shape} at positions "
                f"{start}..{stop - 1}; return plain integers"
            )
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self._length:
            raise ValueError(
                f"the order of epoch {self._epoch} names sample {low if low < 0 else high} at positions "
                f"{start}..{stop - 1}; samples are 0..{self._length - 1}"
            )
        return indices.astype(np.int64)


def _check_slice(start: int, stop: int, length: int) -> None:
    if not 0 <= start <= stop <= length:
        raise ValueError(f"positions {start}..{stop} are not within an epoch of {length} samples")


def _round_keys(seed: int, epoch: int) -> list[tuple[np.uint64, np.uint64]]:
    """Independent keys for each coordinate in each pair of rounds; any integers do as seed and epoch."""
    text = f"paceline order {seed} {epoch}".encode()
    digest = hashlib.shake_256(text).digest(_NUM_PAIRS * 16)
    # Little-endian is named, so that every machine reads the same numbers.
    keys = [np.uint64(key) for key in np.frombuffer(digest, dtype="<u8")]
    return list(zip(keys[::2], keys[1::2], strict=True))


def _mix(values: npt.NDArray[np.uint64], key: np.uint64) -> npt.NDArray[np.uint64]:
    """A keyed hash of each value, of 63 bits: the finalizer of splitmix64. Products wrap around, which is meant."""
    mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    # A bit of room, so that adding a coordinate never wraps: a sum that wraps could not be undone.
    mixed >>= np.uint64(1)
    return mixed
