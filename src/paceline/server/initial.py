"""The value a row begins with: a pure function of (seed, name of the table, id).

Promises:
- Every server computes the same numbers for the same row, on any platform and in whatever batch: integers are mixed,
  and each is turned into a float by one conversion and one product, which IEEE 754 defines to the last bit.
- "uniform" is one of 2**24 evenly spaced numbers in [-scale, scale).
- "normal" follows the normal distribution of standard deviation `scale` in steps: its quantiles at multiples of 1/4096
  are exact to 2**-17, between them is a straight line, and nothing lies beyond 4 standard deviations. The quantiles
  come from libm, but as integers; none of them is so near to a boundary of rounding that two libms could disagree.
"""

from __future__ import annotations

import functools
import hashlib
import statistics

import numpy as np
import numpy.typing as npt
import torch

from paceline.server.spec import TableSpec

# Rows made together: enough that calls cost little, so few that what is between two steps stays in the cache.
_CHUNK = 8192
_NUM_QUANTILES = 2048
_QUANTILE_UNIT = 2**16
_LAST_QUANTILE = 4.0
_FRACTION_BITS = 12


class InitialRows:
    def __init__(self, spec: TableSpec) -> None:
        self._spec = spec
        self._num_words = -(-spec.dim // 2)
        text = f"paceline row {spec.seed} {spec.name}".encode()
        digest = hashlib.shake_256(text).digest(8 * (1 + self._num_words))
        # Little-endian is named, so that every machine reads the same numbers.
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        self._id_key, self._word_keys = keys[0], keys[1:]

    def of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows [n, dim] of these ids, in the dtype of the table."""
        spec = self._spec
        rows = torch.zeros((len(ids), spec.dim), dtype=spec.torch_dtype)
        if spec.init != "zeros":
            array = ids.contiguous().numpy()
            for start in range(0, len(ids), _CHUNK):
                rows[start : start + _CHUNK] = self._chunk(array[start : start + _CHUNK])
        return rows

    def _chunk(self, ids: npt.NDArray[np.int64]) -> torch.Tensor:
        mixed = _mix(ids.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._id_key)
        words = _mix(mixed[:, None] + self._word_keys)
        # Each word gives two numbers; which half comes first must not depend on the machine.
        parts = np.empty((len(ids), self._num_words, 2), dtype=np.uint32)
        parts[:, :, 0] = words
        parts[:, :, 1] = words >> np.uint64(32)
        if self._spec.init == "normal":
            steps, unit = _normal(parts), 1 / (_QUANTILE_UNIT << _FRACTION_BITS)
        else:
            steps, unit = (parts >> np.uint32(8)).astype(np.int32) - np.int32(2**23), 2.0**-23
        flat = torch.from_numpy(steps.reshape(len(ids), -1)[:, : self._spec.dim])
        # The unit is a power of two, so the only rounding besides that of the scale is the product's.
        return flat.to(self._spec.math_dtype).mul_(self._spec.scale * unit)


def _normal(parts: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """24 of the bits: which quantile (11), how far to the next one (12), which side of 0 (1)."""
    quantiles, gaps = _quantiles()
    at = (parts >> np.uint32(21)).astype(np.intp)
    fraction = ((parts >> np.uint32(21 - _FRACTION_BITS)) & np.uint32((1 << _FRACTION_BITS) - 1)).astype(np.int32)
    steps = quantiles[at]
    steps <<= _FRACTION_BITS
    fraction *= gaps[at]
    steps += fraction
    # Two's complement: -x is ~x + 1, and ~x is x ^ -1.
    side = (parts & np.uint32(1)).astype(np.int32)
    steps ^= -side
    steps += side
    return steps


@functools.cache
def _quantiles() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Those of the upper half of the normal distribution as integers, and the gap from each to the next."""
    normal = statistics.NormalDist()
    upper = [normal.inv_cdf(0.5 + at / (2 * _NUM_QUANTILES)) for at in range(_NUM_QUANTILES)]
    edges = np.array([round(value * _QUANTILE_UNIT) for value in [*upper, _LAST_QUANTILE]], dtype=np.int32)
    return edges[:-1].copy(), np.diff(edges)


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64, in place. Products wrap around, which is meant."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values
