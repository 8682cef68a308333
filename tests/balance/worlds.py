"""Workers that exist as numbers only: what they would measure, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paceline.balance import Balance, StepTiming

SAMPLE_S = 1e-3


class Seat(NamedTuple):
    member: str
    host: str = ""
    capacity: float = 0.0
    tried: tuple[float, float] | None = None


def seats(count: int) -> list[Seat]:
    return [Seat(f"w{rank}", f"host{rank}") for rank in range(count)]


class World:
    """`speeds(step)` is how fast each worker is then, `noise` the spread of a measurement, `hiccups` how many of them
    take several times as long, `fixed_s` what a step costs at speed 1 beside its samples, `sample_s` what each of those
    costs: with 0 the share makes no difference."""

    def __init__(
        self,
        speeds: Callable[[int], Sequence[float]],
        *,
        total: int = 192,
        noise: float = 0.0,
        hiccups: float = 0.0,
        fixed_s: float = 0.0,
        sample_s: float = SAMPLE_S,
        seed: int = 0,
    ) -> None:
        self._speeds, self._fixed_s, self._sample_s = speeds, fixed_s, sample_s
        self._noise, self._hiccups = noise, hiccups
        self._random = random.Random(seed)
        self.total = total
        self.step = 0
        self.balance = Balance().seated(seats(len(speeds(0))), total, 1)
        self.changes: list[int] = []  # after which step
        self.reasons: list[str] = []  # of each change
        self.efficiencies: list[float] = []  # of each step: the shortest possible one over the real one

    def run(self, num_steps: int) -> World:
        for _ in range(num_steps):
            self._take_step()
        return self

    def _take_step(self) -> None:
        speeds, shares = self._speeds(self.step), self.balance.shares
        true = [(self._fixed_s + self._sample_s * share) / speed for share, speed in zip(shares, speeds, strict=True)]
        best_s = (self._sample_s * self.total + self._fixed_s * len(speeds)) / sum(speeds)
        self.efficiencies.append(best_s / max(true))
        measures = [StepTiming(share, self._measured(seconds)) for share, seconds in zip(shares, true, strict=True)]
        version = self.balance.version
        self.balance = self.balance.observed(measures, self.total, 1)
        self.step += 1
        if self.balance.version != version:
            self.changes.append(self.step)
            self.reasons.append(self.balance.reason)

    def _measured(self, seconds: float) -> float:
        seconds *= max(0.5, self._random.gauss(1.0, self._noise))
        return seconds * self._random.uniform(1.5, 5.0) if self._random.random() < self._hiccups else seconds
