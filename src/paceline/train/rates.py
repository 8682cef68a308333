"""Learning rates that fit the global batch: scaling, warm-up, and a course over the training.

    rates = Rates(base_batch=256, scale="linear", warm_up=WarmUp(steps=500), schedule="cosine")
    schedule = rates.build(optimizer, global_batch=1024, num_steps=10_000)      # or Task(schedule=rates)

The rate of a step is the optimizer's own rate times

    scale       global_batch / base_batch ("linear"), its square root ("sqrt"), or 1 (None). Not by the number of
                workers: the global batch stays what it is when workers come and go, and so do the rates
    warm-up     rises in equal parts from `start`, so that step number `steps` is the first with the full rate
    schedule    what is left of the rate, from the end of the warm-up to the end of the training

What comes out is a torch scheduler, to be stepped after each step. It depends on the number of the step alone, so it is
equal on all workers; its state is a few numbers, which survive in checkpoints and reach newcomers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

# From the part of the training that is done (0 to 1, warm-up not counted) to the part of the rate that is left.
Course = Callable[[float], float]

COURSES: dict[str, Course] = {
    "constant": lambda _: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}
_SCALES: dict[str | None, Callable[[float], float]] = {None: lambda _: 1.0, "linear": lambda k: k, "sqrt": math.sqrt}


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """For the first `steps` steps the learning rate rises from the part `start` of the full one.

    >>> paceline.Rates(warm_up=paceline.WarmUp(steps=500), schedule="cosine")
    """

    steps: int
    start: float = 0.0

    def __post_init__(self) -> None:
        if type(self.steps) is not int or self.steps < 1:
            raise ValueError(f"WarmUp(steps={self.steps!r}): give 1 step or more; for none, leave the warm-up out")
        if not 0.0 <= self.start <= 1.0:
            raise ValueError(f"WarmUp(start={self.start!r}): give the part of the full rate to start from, 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Learning rates over a training, as a factor of the optimizer's own rate.

    >>> schedule = paceline.Rates(base_batch=256, scale="linear", schedule="cosine").build(
    ...     optimizer, global_batch=1024, num_steps=10_000
    ... )

    `base_batch` is the global batch for which the optimizer's own rate was chosen, `scale` says how to get from there
    to the global batch of this training. `schedule` is a name, or a function of the part of the training that is done;
    where it comes to 0, the part `final` of the rate is left."""

    base_batch: int | None = None
    scale: Literal["linear", "sqrt"] | None = None
    warm_up: WarmUp | None = None
    schedule: Literal["constant", "linear", "cosine"] | Course = "constant"
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.scale not in _SCALES:
            raise ValueError(f"Rates(scale={self.scale!r}): give 'linear', 'sqrt' or None")
        if (self.base_batch is None) != (self.scale is None):
            raise ValueError(
                f"Rates(base_batch={self.base_batch!r}, scale={self.scale!r}): give both, the batch for which the "
                "optimizer's rate was chosen and how to scale from there, or neither"
            )
        if self.base_batch is not None and (type(self.base_batch) is not int or self.base_batch < 1):
            raise ValueError(f"Rates(base_batch={self.base_batch!r}): give 1 sample or more")
        if not callable(self.schedule) and self.schedule not in COURSES:
            raise ValueError(
                f"Rates(schedule={self.schedule!r}): give one of {', '.join(map(repr, COURSES))}, or a function of the "
                "part of the training that is done"
            )
        if not 0.0 <= self.final <= 1.0:
            raise ValueError(f"Rates(final={self.final!r}): give the part of the full rate that is left, 0 to 1")

    def factor(self, step: int, *, global_batch: int, num_steps: int) -> float:
        """What to multiply the optimizer's own rate with in a step; the first is number 0."""
        scale = _SCALES[self.scale](global_batch / self.base_batch if self.base_batch is not None else 1.0)
        num_warm = self.warm_up.steps if self.warm_up is not None else 0
        if self.warm_up is not None and step < num_warm:
            return scale * (self.warm_up.start + (1.0 - self.warm_up.start) * (step + 1) / num_warm)
        progress = min(1.0, (step - num_warm) / max(1, num_steps - num_warm))
        course = self.schedule if callable(self.schedule) else COURSES[self.schedule]
        return scale * (self.final + (1.0 - self.final) * float(course(progress)))

    def build(self, optimizer: torch.optim.Optimizer, *, global_batch: int, num_steps: int) -> RateSchedule:
        """A scheduler for an optimizer, for a training of so many steps; step it after each."""
        self.check(num_steps)
        return RateSchedule(optimizer, self, global_batch=global_batch, num_steps=num_steps)

    def check(self, num_steps: int) -> None:
        """`ValueError` if a training is too short for the warm-up."""
        if self.warm_up is not None and self.warm_up.steps >= num_steps:
            raise ValueError(
                f"WarmUp(steps={self.warm_up.steps}) is not shorter than the training, which has {num_steps} steps; "
                "give fewer, or train for longer"
            )


class RateSchedule(LRScheduler):
    """The rates of one optimizer. Its state holds no function and no length: after a resume with more epochs, the rest
    follows the longer course."""

    def __init__(self, optimizer: torch.optim.Optimizer, rates: Rates, *, global_batch: int, num_steps: int) -> None:
        self._rates = rates
        self._global_batch = global_batch
        self._num_steps = num_steps
        super().__init__(optimizer)

    def get_lr(self) -> list[float | torch.Tensor]:
        factor = self._rates.factor(self.last_epoch, global_batch=self._global_batch, num_steps=self._num_steps)
        return [base * factor for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in _STATE:
            setattr(self, name, state_dict[name])


_STATE = ("last_epoch", "base_lrs", "_last_lr", "_step_count")
