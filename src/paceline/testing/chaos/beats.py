"""What the workers of a run wrote about their steps: one file for each process, read while they write."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path


@dataclass
class WorkerBeats:
    """A process that ran the script. `steps` are the times at which it finished one; `end_code` is None unless it
    ended by itself."""

    pid: int
    started: float = 0.0
    steps: list[float] = field(default_factory=list)
    end_code: int | None = None
    ended: float = 0.0

    def gaps(self) -> Iterator[tuple[float, float]]:
        return pairwise(self.steps)


class Beats:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read_bytes: dict[Path, int] = {}
        self.workers: dict[int, WorkerBeats] = {}

    def look(self) -> dict[int, WorkerBeats]:
        """All workers that ever wrote, with all that they have written by now."""
        for path in self._folder.iterdir():
            self._look_at(path)
        return self.workers

    def _look_at(self, path: Path) -> None:
        with path.open("rb") as file:
            file.seek(self._read_bytes.get(path, 0))
            data = file.read()
        whole = data.rpartition(b"\n")[0]
        if not whole:
            return
        self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole) + 1
        worker = self.workers.setdefault(int(path.name), WorkerBeats(int(path.name)))
        for line in whole.decode().splitlines():
            word, time, number = line.split()
            if word == "step":
                worker.steps.append(float(time))
            elif word == "start":
                worker.started = float(time)
            else:
                worker.end_code, worker.ended = int(number), float(time)


def run_gaps(workers: Iterable[WorkerBeats]) -> Iterator[tuple[float, float]]:
    """The gaps in which no worker at all made a step."""
    return pairwise(sorted(time for worker in workers for time in worker.steps))
