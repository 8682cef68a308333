"""Batches for one worker, collated ahead of time by loader workers that live as long as the Loader.

`fetch(work, following)` returns the batch of `work`. Meanwhile the works that follow under the present plan are
collated by the loader workers, `num_workers * prefetch_factor` at a time. When the plan changed, what was collated for
the old one is dropped: `work` is requested at once, and loader workers give up stale requests between two samples. So a
change of plan costs at most the sample that each is at; a batch that takes a moment only is collated on the spot. With
`num_workers=0` each one is, and nothing of what follows plays a part.

Loader workers are those of torch's DataLoader: its batch sampler hands out requests without end, and where there is
nothing to prefetch, idle ones that are answered at once. So the loader workers never see an end, and no epoch starts
them anew.

Failures:
- An error of the dataset or of collate_fn is raised by the fetch of its batch, with its type and its traceback. The
  Loader stays usable.
- A loader worker that died, however it died, is noticed at once (`pool.py`). All of them are started again, and what
  was requested is requested again. Samples draw from (seed, epoch, sample), so the batch is the same. After
  `MAX_DEATHS` in a row without the batch that is waited for, the fetch raises `LoaderError` with the sample that the
  last one was at, and closes the Loader.
- An answer that took longer than `timeout` is a `LoaderError` too.
- After `close()`, which is called twice without harm, no loader worker is left. An interpreter that exits without it
  ends them too.

Signals: torch sets a handler of SIGCHLD that raises wherever the main thread happens to be, in the middle of a
collective operation for instance. It does so only when loader workers are started by the main thread; here another one
starts them. Loader workers do not mind SIGTERM and SIGINT: whether to go on is the trainer's decision.

One thread at a time may use a Loader.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from paceline.data.collating import Answer, BatchMaker, handed_on
from paceline.data.dataset import check_dataset
from paceline.data.pool import Beginning, Death, Pool
from paceline.data.window import BatchSpec, Following, LoaderRequest, PrefetchWindow
from paceline.errors import LoaderError

MAX_DEATHS = 5  # in a row, each of which cost all loader workers
_NEVER = 2**62
_SOON_S = 0.02  # a batch that takes no longer than this is not worth waiting for loader workers
_DYING_S = 1.0  # from the first descriptor that breaks to the end of a process


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """How samples are loaded; each field means what it means to torch's DataLoader.

    >>> loader = paceline.LoaderOptions(num_workers=2, prefetch_factor=4)
    >>> session = paceline.Session(model, optimizer, data=data, global_batch=256, loader=loader)
    """

    num_workers: int = 0
    collate_fn: Callable[[list[Any]], Any] | None = None
    pin_memory: bool = False
    prefetch_factor: int | None = None
    worker_init_fn: Callable[[int], None] | None = None
    multiprocessing_context: Any = None
    timeout: float = 0

    def __post_init__(self) -> None:
        if type(self.num_workers) is not int or self.num_workers < 0:
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
    """Loads the batches of one worker from a map-style dataset; see the module's text. `on_death` is told of every
    loader worker that died, in words."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        options: LoaderOptions | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.length = check_dataset(dataset)
        self._options = options or LoaderOptions()
        self._batches = BatchMaker(dataset, seed, self._options.collate_fn, num_workers=self._options.num_workers)
        self._window = PrefetchWindow(self._options.depth)
        self._outbox: deque[LoaderRequest] = deque()
        self._pool: Pool | None = None
        self._closed = False
        self._division = (-1, -1)  # generation and version of the last work
        self._usual_s = math.inf  # how long a loader worker took for its last batch
        self._on_death = on_death
        self.num_deaths = 0
        self._num_in_row = 0  # since a batch that was waited for has come

    def fetch(self, work: BatchSpec, following: Following) -> Any:
        """The collated batch of `work`, None if it has no samples. `following(k)` is the k-th work after it.

        `following` is called from this thread, now, for works further and further ahead; None ends the look ahead.
        """
        if self._closed:
            raise LoaderError(f"cannot load the batch of step {work.tag[1]}: this Loader was closed; make a new one")
        if not self.has_workers:
            return None if work.is_empty else self._pinned(self._batches.collate(work))
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
        self._num_in_row = 0
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
        if not self.has_workers:
            return True
        return self._pool is not None and self._pool.has_answer()

    def _is_quicker_here(self) -> bool:
        """After a change of plan others wait for this batch: it is collated on the spot if that takes a moment only."""
        is_new = self._window.wanted is None and self._pool is not None
        return is_new and self._usual_s < _SOON_S and self._options.worker_init_fn is None

    def close(self) -> None:
        """End all loader workers."""
        self._closed = True
        pool, self._pool = self._pool, None
        if pool is not None:
            self._batches.give_up_before(_NEVER)
            pool.end()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _exchange(self, work: BatchSpec, following: Following) -> Answer:
        """One request goes out, one answer comes in: that of the oldest request under way. Where a loader worker died,
        all that are under way go out again."""
        while True:
            self._fill_outbox(following)
            try:
                return self._take()
            except BaseException as error:
                if isinstance(error, Exception) and self._survives(error, work):
                    continue
                # No answer will come any more: the wanted work must be requested anew, or cannot be.
                self._window.finish()
                self.close()
                if isinstance(error, Exception):
                    raise self._explained(error, work) from error
                raise

    def _fill_outbox(self, following: Following) -> None:
        # Torch takes `depth` requests when it starts, and one with each answer.
        needed = 1 if self._pool is not None else self._options.depth + 1
        # Here and not in the batch sampler, so that an error of `following` leaves torch's iterator as it is.
        while len(self._outbox) < needed:
            self._outbox.append(self._window.next_request(following))

    def _take(self) -> Answer:
        if self._pool is None:
            self._pool = self._start()
        answer: Answer = self._pool.take()
        return answer

    def _survives(self, error: Exception, work: BatchSpec) -> bool:
        """Whether a loader worker died, and not too many in a row; then all that was requested is lost."""
        if self._pool is None or (death := self._pool.find_death(_DYING_S)) is None:
            return False
        self.num_deaths += 1
        self._num_in_row += 1
        words = self._words_of(death)
        if self._on_death is not None:
            self._on_death(f"{words}; number {self.num_deaths} of this worker's")
        if self._num_in_row >= MAX_DEATHS:
            error.add_note(words)
            return False
        pool, self._pool = self._pool, None
        pool.end()
        self._outbox.clear()
        self._window.lose_requests()
        return True

    def _words_of(self, death: Death) -> str:
        at = self._batches.sample_at(death.worker)
        where = f" at sample {at[1]} of epoch {at[0]}" if at is not None else ""
        return f"{death}{where}"

    def _explained(self, error: Exception, work: BatchSpec) -> LoaderError:
        generation, step = work.tag
        batch = f"the batch of step {step} (generation {generation}, {len(work.indices)} samples of epoch {work.epoch})"
        if self._num_in_row >= MAX_DEATHS:
            (how,) = error.__notes__
            return LoaderError(
                f"{batch} did not come: loader workers died {self._num_in_row} times in a row, the last time "
                f"{how}. If nobody kills them, look for a lack of memory (dmesg tells of the kernel's out-of-memory "
                "killer; use fewer num_workers, a smaller prefetch_factor) and for that sample; "
                "num_workers=0 shows where it happens"
            )
        return LoaderError(
            f"{batch} did not come from the loader workers: {error}. If it was too slow, raise timeout; "
            "num_workers=0 shows errors of the dataset where they happen"
        )

    def _start(self) -> Pool:
        options = self._options
        self._batches.forget_samples()
        loader: DataLoader[Any] = DataLoader(
            self._batches,  # type: ignore[arg-type]  # it has what the fetcher calls
            batch_sampler=_Outgoing(self._outbox),  # type: ignore[arg-type]  # requests in place of lists of indices
            num_workers=options.num_workers,
            collate_fn=handed_on,  # type: ignore[arg-type]
            pin_memory=options.pin_memory,
            # Of its own, so that starting draws nothing from the trainer's generator.
            generator=torch.Generator(),
            prefetch_factor=options.depth // options.num_workers,
            persistent_workers=True,
            worker_init_fn=Beginning(options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context,
            timeout=options.timeout,
        )
        return Pool(lambda: iter(loader))

    def _pinned(self, batch: Any) -> Any:
        """As the DataLoader does it: only where there is a device to copy to."""
        if self._options.pin_memory and torch.accelerator.is_available():
            return pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch


class _Outgoing:
    """The batch sampler: hands out the requests that lie ready."""

    def __init__(self, outbox: deque[LoaderRequest]) -> None:
        self._outbox = outbox

    def __iter__(self) -> _Outgoing:
        return self

    def __next__(self) -> LoaderRequest:
        return self._outbox.popleft()
