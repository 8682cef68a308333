"""What is measured, and with which workers."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.bench.errors import BadInput

ALONE, AT_ONCE = "each alone", "all at once, no communication"
AUTO, EQUAL, DDP = "Paceline", "Paceline, equal shares", "DDP on Gloo"

CNN, TIMED = "cnn", "timed"

_LEAST, _MOST = 0.1, 1.0


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

    def __post_init__(self) -> None:
        if self.work not in (CNN, TIMED):
            raise BadInput(f"--work {self.work}: give {CNN} or {TIMED}")
        if self.num_rounds < 1 or not 0.5 <= self.seconds <= 600:
            raise BadInput(f"--rounds {self.num_rounds} must be 1 or more, --seconds {self.seconds} from 0.5 to 600")
        if not 2 <= self.samples <= 10_000:
            raise BadInput(f"--samples {self.samples}: give 2 to 10000 for each worker")
        if not 1 <= self.num_changes <= 100:
            raise BadInput(f"--changes {self.num_changes}: give 1 to 100")
        if self.change_every and not 50 <= self.change_every <= 10_000:
            raise BadInput(f"--change-every {self.change_every}: give 50 to 10000 steps, or 0 to leave that part out")

    @property
    def total(self) -> int:
        """The global batch."""
        return self.samples * len(self.speeds)

    @property
    def contenders(self) -> tuple[str, ...]:
        return (ALONE, AT_ONCE, AUTO, EQUAL, *self.against)


def parse_speeds(text: str) -> tuple[float, ...]:
    try:
        speeds = tuple(float(part) for part in text.split(","))
    except ValueError:
        speeds = ()
    if len(speeds) < 2 or not all(_LEAST <= speed <= _MOST for speed in speeds):
        raise BadInput(
            f"--speeds {text}: give a part of a core, {_LEAST} to {_MOST}, for each worker, such as 1,0.5,0.25"
        )
    return speeds
