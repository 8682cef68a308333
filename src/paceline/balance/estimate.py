"""How fast a worker is, from the time that each of its steps took: robust to noise, quick where it really changed.

A step is one measurement (n samples, t seconds). What is believed is a line, `fixed_s + per_sample_s * n`: it goes
through the *level*, the mean of the last `_MEMORY` measurements, and its slope comes from the *evidence*, which is what
the time did whenever the share changed. The two are forgotten differently. The level follows the last steps. Steps with
one and the same share say nothing of the slope, so they do not wear the evidence out: what a change of the share did to
the time stays known until another change, or another speed, says more. Without evidence the whole time counts as time
for samples.

- A measurement far off the line (beyond `band`) counts as if it were at the edge of the band: one hiccup moves little.
- Three in a row beyond the same edge are no hiccup. If the share is another one than before, and a flatter line goes
  through both levels, the slope was wrong: that is evidence. Otherwise the worker has another speed now.
- The first three are needed for a first level: their median.
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
_LEAST_PRIOR = 0.001  # of the share, squared: the noise of a quiet machine, over _FIXED, squared
# A flat line would hand out any number of samples for a difference of a millisecond. What is divided by is at least so
# steep, as a part of the whole time; whether a change gains anything is asked of the line as it is.
_LEAST_SLOPE = 0.35
_CAUTION = (
    1.5  # times the doubt: shares change when a worker is slow, often by chance, and then it seems to have helped
)
_FLAT = 0.15  # of the whole time: if no more than that is time for samples, a smaller share is no help worth having
_MOST_EVIDENCE = 4.0  # of the share, squared: what was seen long ago gives way
_AFTER_CHANGE = 0.75  # so much of the evidence is left when the speed is another one: it may be of other work
_OTHER_SHARE = 0.02  # of the share


class Estimate(msgspec.Struct, frozen=True, array_like=True):
    """`count` are the measurements since the last change of speed, `noise` is how far one is off the line, usually, as
    a part of it; `limit` the most samples that fit, 0 for all; `change` by how much the speed has changed, as the time
    for the same samples over what it was, since somebody asked last (`settled`)."""

    count: int = 0
    samples: float = 0.0
    seconds: float = 0.0
    spread: float = 0.0  # the evidence: the sum of squares of how far samples were off the level,
    effect: float = 0.0  # and the sum of products with how far seconds were
    noise: float = _FIRST_NOISE
    # The last measurements, if they were beyond one edge of the band, over the line; at first, seconds a sample.
    beyond: tuple[float, ...] = ()
    limit: int = 0
    change: float = 1.0

    @property
    def is_measured(self) -> bool:
        return self.count > 0

    def pace(self) -> Pace:
        """Of a worker that was measured: the line to divide a batch by."""
        return self._line(max(_LEAST_SLOPE * self.seconds / self.samples, self._slope()))

    def cautious_slope(self) -> float:
        """What a worker that was measured gains by one sample less, in seconds, at least: as far as is known."""
        doubt = self.noise * self.seconds / math.sqrt(self.spread + self._prior())
        slope = self._slope() - _CAUTION * doubt
        return slope if slope > _FLAT * self.seconds / self.samples else 0.0

    def uncertainty(self) -> float:
        """About how far the level may be off, as a part of it."""
        return self.noise / math.sqrt(min(self.count, _MEMORY)) if self.count else 1.0

    def settled(self) -> Estimate:
        """Whatever changes from here on is new."""
        return self if self.change == 1.0 else msgspec.structs.replace(self, change=1.0)

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
            return Estimate(
                _STUBBORN, float(samples), samples * _median(first), noise=self.noise, limit=limit, change=self.change
            )
        line = self._line(self._slope()).time_s(samples)
        ratio = seconds / line
        band = max(_LEAST_BAND, _BAND * self.noise)
        low, high = 1.0 / (1.0 + band), 1.0 + band
        beyond: tuple[float, ...] = ()
        if not low <= ratio <= high:
            same_side = bool(self.beyond) and (self.beyond[0] > 1.0) == (ratio > 1.0)
            beyond = (*self.beyond, ratio) if same_side else (ratio,)
            if len(beyond) == _STUBBORN:
                return self._corrected(samples, line, _median(beyond))
        kept = min(high, max(low, ratio))
        if beyond and self._is_other(samples):
            # Until it is clear what the new share did to the time, the level is that of the share before.
            return msgspec.structs.replace(self, noise=self._noise_with(abs(kept - 1.0)), beyond=beyond)
        return self._added(float(samples), line * kept, abs(kept - 1.0), beyond)

    # -- the line ----------------------------------------------------------------------------------------------------

    def _prior(self) -> float:
        """How much it weighs that without evidence there is no fixed time: as much as the noise allows."""
        noise = self.noise / _FIXED
        return max(_LEAST_PRIOR, noise * noise) * self.samples * self.samples

    def _slope(self) -> float:
        whole, prior = self.seconds / self.samples, self._prior()
        return min(whole, max(0.0, (self.effect + prior * whole) / (self.spread + prior)))

    def _line(self, slope: float) -> Pace:
        return Pace(max(0.0, self.seconds - slope * self.samples), slope, self.limit)

    def _is_other(self, samples: int) -> bool:
        return abs(samples - self.samples) > _OTHER_SHARE * self.samples

    def _weight(self) -> float:
        return max(1.0 / (self.count + 1), 1.0 / _MEMORY)

    def _noise_with(self, off: float) -> float:
        return self.noise + self._weight() * (off - self.noise)

    # -- what a measurement changes ----------------------------------------------------------------------------------

    def _corrected(self, samples: int, line: float, ratio: float) -> Estimate:
        """Three steps were beyond the band, on the same side: either the slope is wrong or the speed is another one."""
        more, longer = samples - self.samples, line * ratio - self.seconds
        level = {"count": _STUBBORN, "samples": float(samples), "seconds": line * ratio, "beyond": ()}
        if self._is_other(samples):
            # Between two means there is as much evidence as between so many single steps.
            weight = _STUBBORN * min(self.count, _MEMORY) / (_STUBBORN + min(self.count, _MEMORY))
            allowed = _LEAST_BAND * self.seconds
            if -allowed <= longer * math.copysign(1.0, more) <= abs(more) * self.seconds / self.samples:
                return self._evident(weight, more, longer, level)
        kept = _AFTER_CHANGE
        return msgspec.structs.replace(
            self,
            **level,
            spread=kept * self.spread,
            effect=kept * ratio * self.effect,
            change=self.change * ratio,
        )

    def _added(self, samples: float, seconds: float, off: float, beyond: tuple[float, ...]) -> Estimate:
        weight = self._weight()
        more, longer = samples - self.samples, seconds - self.seconds
        level = {
            "count": self.count + 1,
            "samples": self.samples + weight * more,
            "seconds": self.seconds + weight * longer,
            "noise": self._noise_with(off),
            "beyond": beyond,
        }
        return self._evident(1.0 - weight, more, longer, level)

    def _evident(self, weight: float, more: float, longer: float, level: dict[str, object]) -> Estimate:
        spread, effect = self.spread + weight * more * more, self.effect + weight * more * longer
        fading = min(1.0, _MOST_EVIDENCE * self.samples * self.samples / spread) if spread > 0.0 else 1.0
        return msgspec.structs.replace(self, **level, spread=fading * spread, effect=fading * effect)


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]
