"""One pass over the data, as a script goes through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.train.frames import boundary_of_loop
from paceline.train.loops.base import Loop
from paceline.train.run import Run


class Epoch:
    """An iterable of this worker's parts of the global batches that are still to be done. Its length is the number of
    steps of the whole epoch."""

    def __init__(self, run: Run, loop: Loop, number: int, num_steps: int) -> None:
        self._run = run
        self._loop = loop
        self._num_steps = num_steps
        self.number = number

    def __len__(self) -> int:
        return self._num_steps

    @boundary_of_loop
    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._loop.batches(self.number)
        except GeneratorExit:
            self._run.endings.loop_left()
            raise

    def __repr__(self) -> str:
        return f"Epoch({self.number})"
