"""Batches for one worker, collated ahead of time by loader workers that live as long as the Loader.

`fetch(work, following)` returns the batch of `work`. Meanwhile the works that follow under the present plan are
collated by the loader workers, `num_workers * prefetch_factor` at a time. When the plan changed, what was collated for
the old one is dropped: `work` is requested at once, and loader workers give up stale requests between two samples. So a
change of plan costs at most the sample that each is at; a batch that takes a moment only is collated on the spot. With
`num_workers=0` each one is.

It is built on torch's DataLoader: its batch sampler hands out requests without end, and where there is nothing to
prefetch, idle ones that are answered at once. So the loader workers never see an end, and no epoch starts them anew.

Failures:
- An error of the dataset or of collate_fn is raised by the fetch of its batch, with its type and its traceback. The
  Loader stays usable.
- A loader worker that died, or an answer that took longer than `timeout`, is a `LoaderError` of the fetch that waits
  (a death is noticed within five seconds), and closes the Loader.
- After `close()`, which is called twice without harm, no loader worker is left. An interpreter that exits without it
  ends them too.

Signals: torch sets a handler of SIGCHLD that raises wherever the main thread happens to be, in the middle of a
collective operation for instance. It does so only when loader workers are started by the main thread; here another one
starts them. Loader workers ignore SIGINT: Ctrl-C reaches them too, but whether to go on is the trainer's decision.

One thread at a time may use a Loader.
"""

from __future__ import annotations

import math
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader

from paceline.data.batches import Answer, Batches, handed_on
from paceline.data.dataset import check_dataset
from paceline.data.window import Following, Request, Window, Work
from paceline.errors import PacelineError

_NEVER = 2**62
_SOON_S = 0.02  # a batch that takes no longer than this is not worth waiting for loader workers
_WAIT_KILLED_S = 5.0


class LoaderError(PacelineError):
    """Batches can no longer be loaded: a loader worker died or was too slow, or the Loader was closed."""


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples are loaded; each field means what it means to torch's DataLoader."""

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0

    def __post_init__(self) -> None:
        if self.num_workers < 0:
            raise ValueError(f"num_workers={self.num_workers}: give 0 (collate on the spot) or more")
        if self.timeout < 0:
            raise ValueError(f"timeout={self.timeout}: give seconds, or 0 for no limit")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ValueError(f"prefetch_factor={self.prefetch_factor}: give 1 or more, or None for torch's default")
        if self.num_workers == 0:
            for name in ("prefetch_factor", "worker_init_fn", "multiprocessing_context", "timeout"):
                if value := getattr(self, name):
                    raise ValueError(f"{name}={value} has no effect without loader workers; give num_workers=1 or more")

    @property
    def depth(self) -> int:
        """How many batches are under way at a time."""
        return self.num_workers * (self.prefetch_factor or 2)


class Loader:
    """Loads the batches of one worker from a map-style dataset; see the module's text."""

    def __init__(self, dataset: Any, *, seed: int, options: LoaderOptions | None = None) -> None:
        self.length = check_dataset(dataset)
        self._options = options or LoaderOptions()
        self._batches = Batches(dataset, seed, self._options.collate_fn, is_shared=self._options.num_workers > 0)
        self._window = Window(self._options.depth)
        self._outbox: deque[Request] = deque()
        self._answers: Iterator[Answer] | None = None
        self._closed = False
        self._division = (-1, -1)  # generation and version of the last work
        self._usual_s = math.inf  # how long a loader worker took for its last batch

    def fetch(self, work: Work, following: Following) -> Any:
        """The collated batch of `work`, None if it has no samples. `following(k)` is the k-th work after it.

        `following` is called from this thread, now, for works further and further ahead; None ends the look ahead.
        """
        if self._closed:
            raise LoaderError(f"cannot load the batch of step {work.tag[1]}: this Loader was closed; make a new one")
        self._window.turn_to(work)
        if work.is_empty:
            self._window.finish()
            return None
        self._batches.give_up_before(self._window.horizon())
        division = (work.tag[0], work.version)
        is_new_plan, self._division = division != self._division, division
        if is_new_plan and self._is_quicker_here():
            batch = self._batches.collate(work)
            self._window.pass_over()
            self._exchange(work, following)  # an answer that is stale comes in, so that what follows goes out
            self._window.finish()
            return batch
        serial, batch, seconds = self._exchange(work, following)
        while serial != self._window.wanted:
            serial, batch, seconds = self._exchange(work, following)
        self._usual_s = seconds
        self._window.finish()
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()  # type: ignore[no-untyped-call]
        return batch

    @property
    def has_workers(self) -> bool:
        return self._options.num_workers > 0

    @property
    def is_ready(self) -> bool:
        """Whether the batch that follows can be had without waiting for loader workers. (With several of them it may be
        that of another that lies there; then it is soon.)"""
        if self._options.num_workers == 0:
            return True
        answers: Any = self._answers  # torch offers no public way
        if answers is None or self._closed:
            return False
        return len(answers._task_info.get(answers._rcvd_idx, ())) == 2 or not answers._data_queue.empty()

    def _is_quicker_here(self) -> bool:
        """After a change of plan others wait for this batch: it is collated on the spot if that takes a moment only."""
        is_new = self._window.wanted is None and self._answers is not None
        return is_new and self._usual_s < _SOON_S and self._options.worker_init_fn is None

    def close(self) -> None:
        """End all loader workers."""
        self._closed = True
        answers, self._answers = self._answers, None
        if answers is not None and self._options.num_workers:
            self._batches.give_up_before(_NEVER)
            processes = answers._workers  # type: ignore[attr-defined]
            # torch offers no public way; leaving it to the garbage collector would leave it to chance.
            try:
                answers._shutdown_workers()  # type: ignore[attr-defined]
            finally:
                # Torch asks and terminates; a process that is stopped hears neither.
                for process in processes:
                    process.kill()
                    process.join(_WAIT_KILLED_S)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _exchange(self, work: Work, following: Following) -> Answer:
        """One request goes out, one answer comes in: that of the oldest request under way."""
        # Torch takes `depth` requests when it starts, and one with each answer.
        needed = 1 if self._answers is not None else self._options.depth + 1
        # Here and not in the batch sampler, so that an error of `following` leaves torch's iterator as it is.
        while len(self._outbox) < needed:
            self._outbox.append(self._window.next_request(following))
        try:
            if self._answers is None:
                self._answers = self._start()
            return next(self._answers)
        except BaseException as error:
            # No answer will come any more: the wanted work must be requested anew, or cannot be.
            self._window.finish()
            if self._options.num_workers:
                self.close()
                if isinstance(error, Exception):
                    raise self._explained(error, work) from error
            raise

    def _explained(self, error: Exception, work: Work) -> LoaderError:
        generation, step = work.tag
        return LoaderError(
            f"the batch of step {step} (generation {generation}, {len(work.indices)} samples of epoch {work.epoch}) "
            f"did not come from the loader workers: {error}. If one was killed, look for a lack of memory "
            "(fewer num_workers, a smaller prefetch_factor); if it was too slow, raise timeout; "
            "num_workers=0 shows errors of the dataset where they happen"
        )

    def _start(self) -> Iterator[Answer]:
        options = self._options
        with_workers: dict[str, Any] = {}
        if options.num_workers:
            with_workers = {
                "prefetch_factor": options.depth // options.num_workers,
                "persistent_workers": True,
                "worker_init_fn": _WorkerInit(options.worker_init_fn),
                "multiprocessing_context": options.multiprocessing_context,
                "timeout": options.timeout,
            }
        loader: DataLoader[Any] = DataLoader(
            self._batches,  # type: ignore[arg-type]  # it has what the fetcher calls
            batch_sampler=_Outgoing(self._outbox),  # type: ignore[arg-type]  # requests in place of lists of indices
            num_workers=options.num_workers,
            collate_fn=handed_on,  # type: ignore[arg-type]
            pin_memory=options.pin_memory,
            # Of its own, so that starting draws nothing from the trainer's generator.
            generator=torch.Generator(),
            **with_workers,
        )
        return iter(loader) if options.num_workers == 0 else _in_another_thread(lambda: iter(loader))


class _Outgoing:
    """The batch sampler: hands out the requests that lie ready."""

    def __init__(self, outbox: deque[Request]) -> None:
        self._outbox = outbox

    def __iter__(self) -> _Outgoing:
        return self

    def __next__(self) -> Request:
        return self._outbox.popleft()


class _WorkerInit:
    """The first thing that a loader worker does."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._given is not None:
            self._given(worker)


def _in_another_thread(make: Callable[[], Iterator[Answer]]) -> Iterator[Answer]:
    made: list[Iterator[Answer]] = []
    failed: list[BaseException] = []

    def run() -> None:
        # Inherited by the loader workers, so that a Ctrl-C before they ignore it does not end them either.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="paceline-loader-start")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return made[0]
