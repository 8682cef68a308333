"""The contract of a loop: in which portions the samples of an epoch are worked through, and by whom.

`StepLoop`: all workers do every step together. `LeaseLoop`: each worker takes the next lease, and meets the others only
between epochs. A session calls a loop on the training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from paceline.train.joining import Joined
from paceline.train.operation import Place


class Loop(Protocol):
    """`num_epochs` is how many the script has asked for so far, `max_steps` after how many steps of the run its present
    loop over epochs ends. `is_open`: leases of an epoch are being done, and there are no operations meanwhile."""

    num_epochs: int
    max_steps: int | None
    lr_factor: float

    @property
    def is_leased(self) -> bool: ...

    @property
    def is_open(self) -> bool: ...

    def connect(self, joined: Joined) -> None:
        """This worker belongs to the run now."""

    def batches(self, epoch: int) -> Iterator[Any]:
        """This worker's parts of what is left of an epoch. After each one `step` must have been called."""

    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        """One update of the model; the mean loss of the samples that went into it."""

    def num_steps_done(self) -> int:
        """Steps of the run that all workers have, between epochs."""

    def refresh(self) -> None:
        """Between epochs, where nobody is at work: have the model that all others have."""

    def save_at_end(self, place: Place) -> None:
        """Write the last checkpoint, on the main worker, when all have come to the end."""

    def num_leases_done(self) -> int:
        """Leases that are known to be done everywhere; 0 where steps are done."""

    def complete(self, step: int) -> bool:
        """Servers have made this step after all, of which this worker was told that it counts before it had to give up:
        count it. Whether that was so."""
