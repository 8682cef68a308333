"""Where the training thread of a worker spends its time. Off, unless `paceline bench SCRIPT` asks for it.

    before = spans.mark("reduce")     from here on this thread reduces; what it did before
    ...
    spans.mark(before)                and goes on with that

One span follows the other without a gap, so that they add up to the whole time. Marks are the business of the training
thread alone. Where nothing is recorded, a mark costs a call and a look at a variable; where something is, two stores
into lists that were made before.

The first steps are left out. After those that were asked for, or when the session ends, the recording goes into a file
of the run's folder, and marks cost nothing again. Times are those of the machine's monotonic clock, which all processes
of one machine share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

VARIABLE = "PACELINE_SPANS"  # set for its workers by `paceline bench SCRIPT`: a `SpanRequest` in JSON
_CAPACITY = 1 << 20  # marks

SpanKind = Literal[
    "script",  # the body of the loop
    "data",  # the batch
    "session",  # what Paceline does between the others
    "forward",  # loss_fn
    "backward",
    "copy",  # gradients to where they are reduced or sent from
    "statistics",  # of BatchNorm, over all workers
    "reduce",  # gradients over all workers
    "header",  # what all workers tell each other of a step
    "servers",  # pushing to servers, and pulling from them
    "leases",  # waiting for the next lease
    "optimizer",
]
SCRIPT: SpanKind = "script"


class SpanRequest(msgspec.Struct, frozen=True):
    """What to record: `num_steps` after the first `skip`, into this folder."""

    folder: str
    skip: int
    num_steps: int


class Recording(msgspec.Struct, frozen=True):
    """What one worker did. Span k is of `kinds[k]`, from `times[k]` to `times[k + 1]`, in nanoseconds; the last time
    ends the last span. `steps` has (first span, number of the step) of each step that was computed."""

    worker: int
    facts: dict[str, str | int | bool]
    kinds: list[SpanKind]
    times: list[int]
    steps: list[tuple[int, int]]


class SpanRecorder:
    def __init__(self, request: SpanRequest, worker: int, facts: Mapping[str, str | int | bool]) -> None:
        self._request = request
        self._worker = worker
        self._facts = dict(facts)
        self._times = [0] * _CAPACITY
        self._kinds: list[SpanKind] = [SCRIPT] * _CAPACITY
        self._steps: list[tuple[int, int]] = []
        self._kind: SpanKind = SCRIPT
        self._num_marks = 0
        self._num_skipped = 0

    def mark(self, kind: SpanKind) -> SpanKind:
        before = self._kind
        if kind != before and self._num_marks < _CAPACITY:
            self._times[self._num_marks] = time.perf_counter_ns()
            self._kinds[self._num_marks] = self._kind = kind
            self._num_marks += 1
        return before

    def step(self, number: int) -> bool:
        """A step is about to be computed; False if it is not wanted any more."""
        if self._num_skipped < self._request.skip:
            self._num_skipped += 1
            self._num_marks = 0
            return True
        self._steps.append((self._num_marks, number))
        return len(self._steps) <= self._request.num_steps and self._num_marks < _CAPACITY

    def recording(self) -> Recording:
        num = self._num_marks
        times = [*self._times[:num], time.perf_counter_ns()]
        return Recording(self._worker, self._facts, self._kinds[:num], times, self._steps)

    def write(self) -> None:
        """Whole or not at all: who waits for the file reads it as soon as it is there."""
        folder = Path(self._request.folder)
        draft = folder / f".w{self._worker}.json"
        draft.write_bytes(msgspec.json.encode(self.recording()))
        draft.replace(folder / f"w{self._worker}.json")


_recorder: SpanRecorder | None = None


def mark(kind: SpanKind) -> SpanKind:
    """From here on the training thread does this; what it did before."""
    return _recorder.mark(kind) if _recorder is not None else SCRIPT


def step(number: int) -> None:
    """The step of this number is about to be computed."""
    if _recorder is not None and not _recorder.step(number):
        finish()


def is_wanted() -> bool:
    """Whether this process is to be recorded."""
    return VARIABLE in os.environ


def begin(facts: Mapping[str, str | int | bool]) -> None:
    """A session begins, of which this is to be known; nothing where nobody asked for a recording."""
    global _recorder
    if is_wanted():
        request = msgspec.json.decode(os.environ[VARIABLE], type=SpanRequest)
        _recorder = SpanRecorder(request, int(os.environ.get("LOCAL_RANK", "0")), facts)


def finish() -> None:
    """Nothing more is recorded; what there is goes into its file."""
    global _recorder
    recorder, _recorder = _recorder, None
    if recorder is not None:
        recorder.write()


def read(folder: Path) -> list[Recording]:
    """All that are there, by worker."""
    found = [msgspec.json.decode(path.read_bytes(), type=Recording) for path in folder.glob("w*.json")]
    return sorted(found, key=lambda recording: recording.worker)
