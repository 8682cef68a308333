"""What is measured, and with which workers."""

from __future__ import annotations

from dataclasses import dataclass

ALONE, AT_ONCE = "each alone", "all at once, no communication"
AUTO, EQUAL, DDP = "Paceline", "Paceline, equal shares", "DDP on Gloo"

CNN, TIMED = "cnn", "timed"


@dataclass(frozen=True)
class Plan:
    """`work` is a small CNN, of which all workers compute on the cores of this machine; or timed: a sample takes a
    millisecond, in which nothing is computed, as if each worker had a device of its own. `speeds` are parts of a core,
    or of that speed, one for each worker; every `change_every` steps they move on by one worker, in a
    part of its own, unless it is 0."""

    work: str
    speeds: tuple[float, ...]
    num_rounds: int
    seconds: float
    change_every: int
    num_changes: int
    against: tuple[str, ...]
    samples: int  # of a worker, where all have the same

    @property
    def total(self) -> int:
        """The global batch."""
        return self.samples * len(self.speeds)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (ALONE, AT_ONCE, AUTO, EQUAL, *self.against)
