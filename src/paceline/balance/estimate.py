"""How fast a worker is, from the time that each of its steps took: robust to noise, quick where it really changed.

A step is one measurement (n samples, t seconds). What is believed is a line, `fixed_s + per_sample_s * n`, fitted to
the measurements with weights that fade over `_MEMORY` steps. As long as a worker always gets the same share, nothing
tells the two apart; then the whole time counts as time for samples.

- A measurement far off the line (beyond `band`) counts as if it were at the edge of the band: one hiccup moves little.
- Three in a row beyond the same edge are no hiccup: the worker has another speed now, and the line is begun anew.
- The first three are needed for a first line: their median.
- Zero, negative or not a number is no measurement.

Frozen, and made of plain numbers: it travels with the training state, and every worker computes the same one.
"""

from __future__ import annotations

import math

import msgspec

from paceline.balance.division import Pace

_MEMORY = 64
_STUBBORN = 3  # so many measurements beyond the band, one after the other, are the truth
_LEAST_BAND = 0.15
_BAND = 4.0  # times the noise
_FIRST_NOISE = 0.1
_FIXED = 0.3  # how large a part of a step its fixed time is, usually; more must be proven against the noise
_LEAST_PRIOR = 0.001  # of the mean share, squared: so much it must have varied at least to tell anything
_LEAST_SLOPE = 0.05  # of the whole time, at the usual share


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """`count` are the measurements since the last change of speed, `noise` is how far one is off the line, usually, as
    a part of it; `limit` the most samples that fit, 0 for all."""

    count: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    variance: float = 0.0  # of the samples
    covariance: float = 0.0  # of samples and seconds
    noise: float = _FIRST_NOISE
    # The last measurements, if they were beyond one edge of the band, over the line; at first, seconds a sample.
    beyond: tuple[float, ...] = ()
    limit: int = 0

    @property
    def is_measured(self) -> bool:
        return self.count > 0

    def pace(self) -> Pace:
        """Of a worker that was measured."""
        whole = self.seconds / self.samples
        # What is believed before the shares have varied, no fixed time, weighs as much as the noise allows.
        noise = self.noise / _FIXED
        weight = max(_LEAST_PRIOR, noise * noise / min(self.count, _MEMORY))
        prior = weight * self.samples * self.samples
        slope = (self.covariance + prior * whole) / (self.variance + prior)
        slope = min(whole, max(_LEAST_SLOPE * whole, slope))
        return Pace(max(0.0, self.seconds - slope * self.samples), slope, self.limit)

    def uncertainty(self) -> float:
        """About how far the line itself may be off, as a part of it."""
        return self.noise / math.sqrt(min(self.count, _MEMORY)) if self.count else 1.0

    def seen(self, samples: int, seconds: float, limit: int) -> Estimate:
        """After one more step."""
        if limit != self.limit:
            self = msgspec.structs.replace(self, limit=limit)
        if samples < 1 or not (math.isfinite(seconds) and seconds > 0):
            return self
        if not self.count:
            first = (*self.beyond, seconds / samples)
            if len(first) < _STUBBORN:
                return msgspec.structs.replace(self, beyond=first)
            return self._moved(samples, samples * _median(first))
        line = self.pace().time_s(samples)
        ratio = seconds / line
        band = max(_LEAST_BAND, _BAND * self.noise)
        low, high = 1.0 / (1.0 + band), 1.0 + band
        beyond: tuple[float, ...] = ()
        if not low <= ratio <= high:
            same_side = bool(self.beyond) and (self.beyond[0] > 1.0) == (ratio > 1.0)
            beyond = (*self.beyond, ratio) if same_side else (ratio,)
            if len(beyond) == _STUBBORN:
                return self._moved(samples, line * _median(beyond))
        kept = min(high, max(low, ratio))
        return self._added(float(samples), line * kept, abs(kept - 1.0), beyond)

    def _moved(self, samples: int, seconds: float) -> Estimate:
        """What was known of another speed is of no use."""
        return Estimate(_STUBBORN, float(samples), seconds, noise=self.noise, limit=self.limit)

    def _added(self, samples: float, seconds: float, off: float, beyond: tuple[float, ...]) -> Estimate:
        weight = max(1.0 / (self.count + 1), 1.0 / _MEMORY)
        more, longer = samples - self.samples, seconds - self.seconds
        return Estimate(
            count=self.count + 1,
            samples=self.samples + weight * more,
            seconds=self.seconds + weight * longer,
            variance=(1.0 - weight) * (self.variance + weight * more * more),
            covariance=(1.0 - weight) * (self.covariance + weight * more * longer),
            noise=self.noise + weight * (off - self.noise),
            beyond=beyond,
            limit=self.limit,
        )


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
