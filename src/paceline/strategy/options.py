"""The settings of a session: one value, checked when it is made, for `Session`, `fit` and strategies alike."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from paceline.data.loader import LoaderOptions
from paceline.data.order import Order
from paceline.strategy.batch_norm import BatchNormName
from paceline.strategy.consistency import Consistency, parse

StrategyName = Literal["allreduce", "server", "hybrid"]
NonFinite = Literal["stop", "skip"]


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """The settings of a session, for `Task(options=...)`; `Session` takes the same ones by name.

    >>> options = paceline.SessionOptions(seed=3, clip_norm=1.0)

    - `seed` decides the order of samples, dropout and new rows. `order`, a function of (seed, epoch, length), replaces
      the shuffled order by one's own.
    - `loader` says how samples are loaded.
    - `micro_batch`: a share is computed so many samples at a time. `clip_norm`: gradients are clipped to this norm.
    - `nonfinite`: a step whose gradient is not finite ends the run ("stop") or is left out ("skip").
    - `strategy` says where the parameters are, `consistency` how up to date they are.
    - `batch_norm="sync"`: BatchNorm layers normalise by the samples of all workers, not by this worker's.
    """

    seed: int = 0
    shuffle: bool = True
    order: Order | None = None
    loader: LoaderOptions = field(default_factory=LoaderOptions)
    micro_batch: int | None = None
    clip_norm: float | None = None
    nonfinite: NonFinite = "stop"
    strategy: StrategyName = "allreduce"
    consistency: str = "sync"
    batch_norm: BatchNormName = "local"

    def __post_init__(self) -> None:
        self._check_kinds()
        if self.micro_batch is not None and self.micro_batch < 1:
            raise ValueError(f"micro_batch={self.micro_batch}: give 1 sample or more, or None to take each share whole")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm={self.clip_norm}: give a norm above 0, or None to leave gradients as they are")
        for name, kind in (("nonfinite", NonFinite), ("strategy", StrategyName), ("batch_norm", BatchNormName)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(map(repr, get_args(kind)))
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {known}")
        if self.batch_norm == "sync" and self.mode.is_leased:
            raise ValueError(
                "batch_norm='sync' exchanges batch statistics in each step, and with consistency='async' or "
                "'bounded:K' workers do not step together; use consistency='sync', or batch_norm='local'"
            )

    def _check_kinds(self) -> None:
        """What is of another kind than it must be is refused here, by name, and not where it is first used."""
        micro_batch, order = self.micro_batch, self.order
        wrong = {
            "seed": (type(self.seed) is int, "a whole number"),
            "order": (order is None or callable(order), "a function of (seed, epoch, length), or None"),
            "loader": (isinstance(self.loader, LoaderOptions), "a LoaderOptions"),
            "micro_batch": (micro_batch is None or type(micro_batch) is int, "a whole number, or None"),
            "consistency": (isinstance(self.consistency, str), "'sync', 'bounded:K' or 'async'"),
        }
        for name, (is_right, wanted) in wrong.items():
            if not is_right:
                raise TypeError(f"{name}={getattr(self, name)!r}: give {wanted}")

    @property
    def mode(self) -> Consistency:
        """What `consistency` says; raises where the strategy cannot have it."""
        return parse(self.consistency, self.strategy)
