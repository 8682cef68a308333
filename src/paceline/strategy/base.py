"""The contract of a strategy: how the gradients of workers with unequal shares become one update of the model.

A session calls, for each step of a synchronous training, in this order and from one thread:

    bind(group, rank, size)      at the start and after every change of membership, with the new group (None: alone)
    compute(loss_fn, batch, ...) this worker's share of the global batch; may be called again for the same step
    reduce(contribution, notice) meet the others; the same agreement on all, or `GroupError` when a member died
    apply(agreement)             the only call that changes parameters, buffers and optimizer state

A group between hosts may send gradients while `compute` makes more of them. So `compute` is called with such a group
only for a step that all its members take, and when it raises there, the group may be over: bind another one.

Between these calls the model is always in the state of the last applied step: whatever `compute` or `reduce` raise, a
donor may stream the model, and the session may bind another group and compute the same step again.

Errors, beside `GroupError` and whatever `loss_fn` and `check` raise (the same on all members where they follow from
what all of them know):

    StrategyError
    ├── Disagreement    workers differ in something that must be equal: hyper-parameters, the kind of weight, the step
    └── Diverged        workers hold different parameters
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntFlag
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from paceline.collective import Group

if TYPE_CHECKING:
    from paceline.strategy.buffers import StagedBuffers
    from paceline.strategy.header import HeaderRows

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
    """What one attempt of one worker gave; the gradients themselves stay in the strategy until the next attempt."""

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
    """What all workers know after a reduction, the same on each.

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


class Strategy(Protocol):
    def bind(self, group: Group | None, rank: int, size: int) -> None:
        """Work with this group from now on. Whatever was computed before is void."""

    def compute(self, loss_fn: LossFn, batch: Any, *, samples: int, total: int, step: int) -> Contribution:
        """Compute this worker's share: `samples` of the `total` of step `step`. With no samples the batch is None and
        `loss_fn` is not called."""

    def reduce(self, contribution: Contribution, notice: Notice) -> Agreement:
        """Add up with the others. Every member calls it, also one without samples."""

    def apply(self, agreement: Agreement) -> None:
        """Update the model, or do nothing if the step does not count. Meets nobody."""

    @property
    def limit(self) -> int:
        """The most samples of one call of `loss_fn` that fit into memory, as far as it is known; 0 for all."""

    def has_batch_statistics(self) -> bool:
        """Whether the model has layers that look at the batch."""

    def needs_two_samples(self) -> bool:
        """Whether the model needs at least two samples a worker: such layers, by the worker's own samples."""

    def state_digest(self) -> int:
        """64 bits over parameters, buffers and optimizer state: the same on two workers when their bits are."""

    def close(self) -> None:
        """Take the hooks off the model and the optimizers."""
