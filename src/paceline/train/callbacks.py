"""Callbacks of `fit`: when and where they are called is said in `paceline.callbacks`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import msgspec


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """The training, and how far it was when this worker began: 0 steps, or more if it resumed or joined later.

    >>> class Say(paceline.callbacks.Callback):
    ...     def on_start(self, run):
    ...         print(f"{run.epochs} epochs of {run.steps_per_epoch} steps, from step {run.step}")
    """

    epochs: int
    steps_per_epoch: int
    global_batch: int
    samples: int
    step: int
    workers: int


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """A step that is done. `step` counts from 1, `epoch` from 0. `loss` is the mean over all workers, `samples` counts
    those of the global batch, `rates` has the learning rate of each parameter group. A skipped step changed nothing,
    because a gradient was not finite.

    >>> class Say(paceline.callbacks.Callback):
    ...     def on_step(self, info):
    ...         print(info.step, info.loss, info.rates)
    """

    step: int
    epoch: int
    loss: float
    samples: int
    rates: tuple[float, ...]
    workers: int
    seconds: float
    skipped: bool


@dataclass(frozen=True, kw_only=True)
class EpochInfo:
    """A whole epoch. `loss` is the mean over its samples, without skipped steps. `scores` are those of the validation
    at its end, if there was one.

    >>> class Say(paceline.callbacks.Callback):
    ...     def on_epoch_end(self, info):
    ...         print(info.epoch, info.loss, info.scores)
    """

    epoch: int
    step: int
    loss: float
    scores: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class ValidationInfo:
    """A validation after `step` steps; `is_best` if no earlier one was as good.

    >>> class Say(paceline.callbacks.Callback):
    ...     def on_validation(self, scores, info):
    ...         print(info.step, info.scores, info.is_best)
    """

    epoch: int
    step: int
    scores: Mapping[str, float]
    is_best: bool


class Callback:
    """Override the methods that you need; all of them do nothing by default. When and where they are called is said in
    `paceline.callbacks`.

    >>> class Say(paceline.callbacks.Callback):
    ...     def on_step(self, info):
    ...         print(info.step, info.loss)
    >>> task = paceline.Task(
    ...     model=model,
    ...     optimizer=optimizer,
    ...     loss_fn=loss_fn,
    ...     data=data,
    ...     global_batch=256,
    ...     epochs=1,
    ...     callbacks=[Say()],
    ... )
    """

    workers: Literal["main", "all"] = "main"

    def on_start(self, run: RunInfo) -> None:
        """Before all other calls on this worker."""

    def on_step(self, info: StepInfo) -> None:
        """After each settled step."""

    def on_validation(self, scores: Mapping[str, Any], info: ValidationInfo) -> None:
        """After each validation. `scores` has everything that `validate` returned, `info.scores` the numbers."""

    def on_epoch_end(self, info: EpochInfo) -> None:
        """After each whole epoch and its validation."""

    def on_stop(self, reason: str) -> None:
        """The last call when the training ended in order: "finished", "early stopping", or "left" when the run was
        asked to stop or this worker to leave. Comes wherever `on_start` came."""

    def on_error(self, error: BaseException) -> None:
        """The last call when the training ends on this worker by an exception, which `fit` raises afterwards."""


class PrintProgress(Callback):
    """A plain line for every so many steps, each epoch and each validation.

    >>> progress = paceline.callbacks.PrintProgress(every_steps=10)
    """

    def __init__(self, every_steps: int = 50, file: IO[str] | None = None) -> None:
        if type(every_steps) is not int or every_steps < 1:
            raise ValueError(f"PrintProgress(every_steps={every_steps!r}): give 1 or more")
        self._every_steps = every_steps
        self._file = file
        self._run: RunInfo | None = None

    def on_start(self, run: RunInfo) -> None:
        self._run = run
        self._print(
            f"training: {run.epochs} epochs of {run.steps_per_epoch} steps, {run.global_batch} samples a step, "
            f"{_count(run.workers, 'worker')}" + (f", from step {run.step}" if run.step else "")
        )

    def on_step(self, info: StepInfo) -> None:
        if info.step % self._every_steps == 0:
            rates = " ".join(f"{rate:.3g}" for rate in dict.fromkeys(info.rates))
            note = ", skipped: a gradient was not finite" if info.skipped else ""
            self._print(
                f"{self._place(info.epoch)} step {info.step}: loss {info.loss:.5g}, rate {rates}, "
                f"{info.samples / max(info.seconds, 1e-9):.0f} samples/s, {_count(info.workers, 'worker')}{note}"
            )

    def on_validation(self, scores: Mapping[str, Any], info: ValidationInfo) -> None:
        told = ", ".join(f"{name} {value:.5g}" for name, value in info.scores.items())
        self._print(f"{self._place(info.epoch)} step {info.step}: validation: {told}{' (best)' * info.is_best}")

    def on_epoch_end(self, info: EpochInfo) -> None:
        self._print(f"{self._place(info.epoch)} done: loss {info.loss:.5g}")

    def on_stop(self, reason: str) -> None:
        self._print(f"training ended: {reason}")

    def on_error(self, error: BaseException) -> None:
        self._print(f"training failed: {type(error).__name__}: {error}")

    def _place(self, epoch: int) -> str:
        return f"epoch {epoch + 1}/{self._run.epochs if self._run else '?'}"

    def _print(self, line: str) -> None:
        print(line, file=self._file or sys.stdout, flush=True)


class JsonLines(Callback):
    """One JSON object a line, appended to a file on the host of the main worker; `kind` says what it is of.

    >>> lines = paceline.callbacks.JsonLines("metrics.jsonl")

    After a resume, steps since the checkpoint are there twice: the later lines count. Values that are not finite are
    null."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: IO[bytes] | None = None

    def on_start(self, run: RunInfo) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        self._write("start", run)

    def on_step(self, info: StepInfo) -> None:
        self._write("step", info)

    def on_validation(self, scores: Mapping[str, Any], info: ValidationInfo) -> None:
        self._write("validation", info)

    def on_epoch_end(self, info: EpochInfo) -> None:
        self._write("epoch", info)

    def on_stop(self, reason: str) -> None:
        self._write("stop", {"reason": reason})
        self._close()

    def on_error(self, error: BaseException) -> None:
        try:
            self._write("error", {"error": f"{type(error).__name__}: {error}"})
        finally:
            self._close()

    def _write(self, kind: str, info: Any) -> None:
        if self._file is not None:
            self._file.write(msgspec.json.encode({"kind": kind, **msgspec.to_builtins(info)}) + b"\n")
            self._file.flush()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Teller:
    """Keeps what happened until it is settled, then tells those callbacks that are told on this worker."""

    def __init__(self, callbacks: Sequence[Callback], is_main: Callable[[], bool], run: Callable[[], RunInfo]) -> None:
        self._callbacks = callbacks
        self._is_main = is_main
        self._run = run
        self._started: list[Callback] = []
        self._waiting: deque[tuple[int, str, tuple[Any, ...]]] = deque()
        self.operation = 0  # how many this worker has seen complete

    @property
    def has_listeners(self) -> bool:
        return bool(self._callbacks)

    def start(self) -> None:
        """This worker has the state of the run."""
        self._listeners()

    def completed(self) -> None:
        """An operation is complete: those before it are settled."""
        self.operation += 1
        self._deliver()

    def tell(self, method: str, *values: Any, of: int) -> None:
        """Something happened in an operation, given by its count here."""
        if self._callbacks:
            self._waiting.append((of, method, values))
            self._deliver()

    def stop(self, reason: str) -> None:
        """All operations are settled; the training ends in order."""
        self.completed()
        for callback in self._started:
            callback.on_stop(reason)

    def fail(self, error: BaseException) -> None:
        """The training ends by an error. One that is raised while it is told of is noted on it."""
        for callback in self._started:
            try:
                callback.on_error(error)
            except Exception as second:
                error.add_note(f"{type(callback).__name__}.on_error raised {type(second).__name__}: {second}")

    def _deliver(self) -> None:
        while self._waiting and self._waiting[0][0] < self.operation:
            _, method, values = self._waiting.popleft()
            for callback in self._listeners():
                getattr(callback, method)(*values)

    def _listeners(self) -> list[Callback]:
        """Those that are told here at present; who becomes one is told of the start."""
        if not self._callbacks:
            return []
        is_main = self._is_main()
        found = [callback for callback in self._callbacks if is_main or callback.workers == "all"]
        for callback in found:
            if not any(callback is other for other in self._started):
                self._started.append(callback)
                callback.on_start(self._run())
        return found


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
