"""The contract of a strategy: how the gradients of workers with unequal shares become one update of the model.

A loop calls an `Updater` (`updater.py`), and that the strategy, for each step, in this order and from one thread:

    attach(group, ...)     at the start and after every change of membership, with the new group (None: alone);
                           returns the store that gradients are put into while backward makes them
    exchange(step, ...)    give the others what this worker has, beside what the store has given; `GroupError` when a
                           member died
    squares(rows)          the norm of the whole gradient, if it is wanted to clip by
    decide(step, ...)      all workers know from the header that the step counts, and with which factor
    apply()                make the update: the only call that changes parameters and optimizer state

Promises
- Between these calls the model is in the state of the last applied step: whatever `exchange` raises, a donor may stream
  the model, and another group may be attached and the same step computed again.
- What `decide` returns says how the update was decided. If `apply` is interrupted after that (a server died, the plan
  is over), the next `attach` is told so in its `BindPoint`, and completes the update before anything else.
- What a strategy keeps between steps changes in `apply` only, and is part of its `state`.

`paceline.testing.contracts.strategy` checks these on any strategy. Errors, beside `GroupError` and whatever `loss_fn`
and `check` raise (the same on all members where they follow from what all of them know):

    StrategyError
    ├── Disagreement    workers differ in something that must be equal: hyper-parameters, the kind of weight, the step
    └── Diverged        workers hold different parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
import torch

from paceline.collective import Group

if TYPE_CHECKING:
    from paceline.strategy.buffers import StagedBuffers
    from paceline.strategy.collector import Collector, GradientStore
    from paceline.strategy.header import HeaderRows
    from paceline.strategy.numerics import Examined
    from paceline.strategy.sparse import RowGradients

# Returns the mean loss over the samples that it was given, or (mean loss, weight) for other means, as over tokens.
LossFn = Callable[..., Any]
# Called often and cheaply during `compute`; raises to end an attempt that has become pointless.
Check = Callable[[], object]


class Flag(IntFlag):
    """What a worker says in the header. The session owns the bits below 16, the strategy those above."""

    LEAVING = 1
    STOP = 2
    CHECKPOINT = 4
    NONFINITE = 1 << 16
    WEIGHTED = 1 << 17  # loss_fn returned a weight
    LATE = 1 << 18  # a gradient came after its bucket was sent


class Notice(msgspec.Struct, frozen=True):
    """What the session says in the header of an operation: its number, the newest generation held, flags; of a step
    also a digest of how its batch is divided, and how long this worker was busy, as in `Row`."""

    operation: int
    held: int = 0
    flags: int = 0
    shares: int = 0
    busy_s: float = 0.0
    reduced_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Contribution:
    """What one attempt of one worker gave; the gradients themselves stay in the store until the next attempt."""

    step: int
    samples: int
    total: int
    weight: float
    weighted_loss: float
    explicit: bool
    used: tuple[bool, ...]
    buffers: StagedBuffers
    loss_fn: LossFn
    batch: Any


@dataclass(frozen=True, eq=False)
class Agreement:
    """What all workers know after an exchange, the same on each.

    A step that does not count must not be applied: `reason` says why in a sentence, and `nonfinite` names the rank
    and the parameter of each worker whose own gradient was not finite (none: their sum was too large). `settling` is
    how the update was decided, for a worker that comes after and finds it not made yet."""

    counts: bool
    loss: float
    total_weight: float
    rows: HeaderRows
    norm: float | None = None
    nonfinite: tuple[tuple[int, str], ...] = ()
    reason: str = ""
    buffers: StagedBuffers | None = field(default=None, repr=False)
    settling: str = ""


class BindPoint(NamedTuple):
    """Where a worker stands when a group is attached: the generation of the plan, the last step that was applied, and
    how its update was decided (empty if that is of no concern). `founding` is that generation where the plan founds
    the run, else 0."""

    generation: int = 0
    step: int = 0
    settling: str = ""
    founding: int = 0


class StrategyState(Protocol):
    """What an update changes beside the model, its buffers and the optimizers of this worker."""

    def gift(self) -> dict[str, Any]:
        """What a newcomer needs of it: "tables" by name, say."""

    def full_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside that: "tables", where they are elsewhere, and then "values" of parameters by
        their `id`, "optimizers" as their `state_dict` has them, and "leases", what has been applied to each range;
        "counts", what optimizers count, where ranges of one parameter differ. All of a range is of one moment."""

    def load(self, part: Mapping[str, Any]) -> None:
        """Become what `gift` or `full_state` gave; anything may be missing."""

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of a table's rows, in order, and the rows."""


class Strategy(Protocol):
    @property
    def state(self) -> StrategyState: ...

    def attach(self, group: Group | None, trained: Mapping[str, torch.Tensor], point: BindPoint) -> GradientStore:
        """Work with this group from now on, after completing what `point` says was decided; where the gradients of
        these parameters go."""

    def exchange(self, step: int, rows: RowGradients, examined: Examined) -> None:
        """Give what this worker has computed, beside what the store's `reduce` has given. All workers do, also one
        without samples. What is not finite is told to `examined`."""

    def squares(self, rows: HeaderRows) -> float:
        """The square of the norm of the whole gradient, the same on all workers."""

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        """The step counts, and the gradients are multiplied by this; how it was decided, for a later `attach`."""

    def apply(self) -> None:
        """Make the update that was decided. Meets no other worker."""

    def close(self) -> None: ...


class StrategyHost(Protocol):
    """What a strategy may ask of the training that it serves."""

    def tell(self, kind: str, text: str) -> None:
        """For the run's log."""

    def check(self) -> None:
        """Raise if the attempt under way is in vain. Cheap: it is called very often."""

    def check_wait(self) -> None:
        """Raise if servers are waited for in vain."""

    def is_loader(self) -> bool:
        """Whether this worker loads what servers lack: the main one, as far as is known."""

    def recall(self, with_optimizers: bool) -> int:
        """After a loss: load what the newest checkpoint has of tables, and of optimizers if told so; the number of its
        last update."""
