"""What a person wants to see of a run, on its way from the workers to the run's database: beside the machines, which
do not need it.

Every worker keeps the rows of its steps until they are on disk, but only the *main* one (rank 0) sends them; after its
death the next one sends what is missing. A newcomer gets the rows that are not on disk with the state: it may be the
only one that is left. So what any worker keeps has no gap after what is recorded. At most one `Progress` of a worker
is waited for; it is answered by `Recorded` when it is on disk. A newer one, for the sake of a line of the log, takes
its place.

A run that lost all holders of its state is founded again from a checkpoint and repeats operations. What is recorded is
therefore said for one *founding*, named by the generation of its plan: rows of earlier foundings are obsolete, but for
those that the checkpoint has. They were settled when it was published, and are *restored* from it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import msgspec

from paceline.control.messages.plan import NOTHING

MAX_ROWS = 20_000  # what a worker keeps while the coordinator is away; the oldest go first
MAX_SENT = 500  # rows in one frame


class StepRow(msgspec.Struct, frozen=True, array_like=True):
    operation: int
    generation: int
    epoch: int
    position: int
    count: int
    loss: float
    seconds: float
    time: float = 0.0  # since 1970, as its worker saw it end; 0 for when it is recorded


class MetricRow(msgspec.Struct, frozen=True, array_like=True):
    operation: int
    name: str
    value: float


class WorkerRow(msgspec.Struct, frozen=True, array_like=True):
    """How one worker is doing. `share` are the samples of its last step, `num_epochs` those it is asked for, 0 if that
    is not known; `starved` is the part of its time in which it waits for a processor."""

    rank: int
    share: int
    samples_per_s: float
    step_s: float
    step: int
    num_epochs: int = 0
    starved: float = 0.0


class LogLine(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to one worker; numbered, because it may be sent twice."""

    number: int
    kind: str
    text: str


class Progress(msgspec.Struct, frozen=True):
    member: str
    number: int
    steps: tuple[StepRow, ...] = ()
    metrics: tuple[MetricRow, ...] = ()
    worker: WorkerRow | None = None
    lines: tuple[LogLine, ...] = ()


class Recorded(msgspec.Struct, frozen=True):
    """The highest operation of a step and of a metric that are on disk in the present founding, and the number of the
    progress that this answers."""

    number: int
    founding: int
    operation: int
    metric: int = NOTHING


class Unrecorded(msgspec.Struct, frozen=True, array_like=True):
    """What a worker keeps because it may not be on disk yet."""

    steps: tuple[StepRow, ...] = ()
    metrics: tuple[MetricRow, ...] = ()
    restored: tuple[StepRow, ...] = ()  # of earlier foundings, from the checkpoint that this one began with


class ProgressKeeper:
    """Rows of one worker, until they are recorded. Used from any thread; nothing here waits."""

    def __init__(self, member: str, *, is_kept: bool = True) -> None:
        """Where there is no database, nothing is kept."""
        self._member = member
        self._is_kept = is_kept
        self._lock = threading.Lock()
        self._steps: deque[StepRow] = deque(maxlen=MAX_ROWS)
        self._metrics: deque[MetricRow] = deque(maxlen=MAX_ROWS)
        self._restored: tuple[StepRow, ...] = ()
        self._worker: WorkerRow | None = None
        self._lines: deque[LogLine] = deque(maxlen=MAX_ROWS)
        self._num_lines = self._num_said = 0  # made, and said
        self._number = 0
        self._under_way: Progress | None = None
        self._is_main = False  # when that was taken

    def add(self, row: StepRow) -> None:
        with self._lock:
            if self._is_kept:
                self._steps.append(row)

    def add_metric(self, row: MetricRow) -> None:
        with self._lock:
            if self._is_kept:
                self._metrics.append(row)

    def unrecorded(self) -> Unrecorded:
        with self._lock:
            return Unrecorded(tuple(self._steps), tuple(self._metrics), self._restored)

    def inherit(self, rows: Unrecorded) -> None:
        """What another worker keeps, from before this one had the state."""
        with self._lock:
            known = {row.operation for row in self._steps}
            steps = [row for row in rows.steps if row.operation not in known]
            metrics = [row for row in rows.metrics if row not in self._metrics]
            self._steps = deque([*steps, *self._steps], maxlen=MAX_ROWS)
            self._metrics = deque([*metrics, *self._metrics], maxlen=MAX_ROWS)
            self._restored = rows.restored

    def restore(self, rows: Iterable[StepRow]) -> None:
        """What was not recorded when the checkpoint was taken that the run begins with. By its number an operation is
        recorded from the beginning, so these are kept until they are sent."""
        with self._lock:
            self._restored = tuple(rows)

    def describe(self, row: WorkerRow) -> None:
        with self._lock:
            self._worker = row

    def log(self, kind: str, text: str) -> None:
        with self._lock:
            self._num_lines += 1
            self._lines.append(LogLine(self._num_lines, kind, text))

    def take(self, is_main: bool) -> Progress | None:
        """What to send now; None while an earlier one is under way. A line does not wait for that: where a disk is
        full no answer comes, and what is still to be told may be the last word of the run."""
        with self._lock:
            if self._under_way is not None and self._num_lines == self._num_said:
                return None
            self._num_said = self._num_lines
            self._number += 1
            self._is_main = is_main
            steps = (*self._restored, *self._steps)[:MAX_SENT] if is_main else ()
            metrics = tuple(self._metrics)[:MAX_SENT] if is_main else ()
            lines = tuple(self._lines)[:MAX_SENT]
            self._under_way = Progress(self._member, self._number, steps, metrics, self._worker, lines)
            return self._under_way

    def recorded(self, answer: Recorded) -> None:
        with self._lock:
            if self._under_way is None or self._under_way.number != answer.number:
                return  # of an earlier connection; what it said will be said again
            done, sent = set(self._under_way.metrics), set(self._under_way.steps)
            self._restored = tuple(row for row in self._restored if row not in sent)
            for _ in self._under_way.lines:
                self._lines.popleft()
            self._under_way = None
            for row in list(self._steps):
                if row.generation < answer.founding or row.operation <= answer.operation:
                    self._steps.remove(row)
            for metric in list(self._metrics):
                # Who is not main drops what main has recorded; main may add to an operation that is recorded already.
                if metric in done or (not self._is_main and metric.operation <= answer.metric):
                    self._metrics.remove(metric)

    def reconnected(self) -> None:
        """What was under way may be lost: it is sent again."""
        with self._lock:
            self._under_way = None

    def has_lines(self) -> bool:
        """Whether there are any that may not be recorded."""
        with self._lock:
            return bool(self._lines)

    def num_unrecorded(self) -> int:
        with self._lock:
            return len(self._steps) + len(self._metrics) + len(self._restored)
