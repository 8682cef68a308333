"""How a request becomes a batch, wherever that happens: in the trainer's process or in a loader worker.

`BatchMaker` is what a torch DataLoader takes for its dataset. Promises:
- Each sample is fetched alone, under random numbers of its own. Collating goes on with those of the batch's last one.
  Samples that need no random numbers are read at once where they can be (`at_once.py`): the batch is the same.
- The global random generators of the process are afterwards as before.
- A stale request is given up between two samples, or before a batch that is read at once. That only saves time: who
  receives the answer decides again.
- In a loader worker an error becomes an answer, which belongs to its request like a batch. So an error of a stale
  request troubles nobody.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import default_collate, get_worker_info

from paceline.data.at_once import ItemReader, read_rows, reads_rows
from paceline.data.seeding import generators_kept, seed_for_sample
from paceline.data.window import BatchSpec, LoaderRequest

# (serial, batch, seconds it took); the batch is None where the request was idle or stale, an ExceptionWrapper where it
# failed.
Answer = tuple[int, Any, float]
_NEVER_STALE = 2**62


class BatchMaker:
    """Answers requests. For loader workers the horizon lies in shared memory: the trainer moves it, they look at it."""

    def __init__(
        self, dataset: Any, seed: int, collate_fn: Callable[[list[Any]], Any] | None, *, num_workers: int
    ) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate_fn or default_collate
        self._reads_rows = collate_fn is None and reads_rows(dataset)
        get = getattr(dataset, "__getitems__", None) if collate_fn is None and not self._reads_rows else None
        self._items = ItemReader(get) if callable(get) else None
        self._horizon = torch.zeros((), dtype=torch.int64)
        self._at = torch.full((num_workers, 2), -1, dtype=torch.int64)  # epoch and index that each is fetching
        if num_workers:  # and only then: torch's memory has a name for a moment, which a killed process leaves behind
            self._horizon.share_memory_()  # type: ignore[no-untyped-call]
            self._at.share_memory_()  # type: ignore[no-untyped-call]

    def give_up_before(self, serial: int) -> None:
        self._horizon.fill_(serial)

    def __getitems__(self, request: LoaderRequest) -> Answer:
        """Called by torch's fetcher, with what the batch sampler gave."""
        began = time.monotonic()
        info = get_worker_info()
        if info is None:
            return request.serial, self._batch(request), time.monotonic() - began
        try:
            return request.serial, self._batch(request, info.id), time.monotonic() - began
        except Exception as error:
            return request.serial, _as_answer(error), 0.0
        finally:
            self._at[info.id, 1] = -1

    def sample_at(self, worker: int) -> tuple[int, int] | None:
        """The epoch and the index of the sample that a loader worker is fetching, or was when it died."""
        epoch, index = self._at[worker].tolist()
        return (epoch, index) if index >= 0 else None

    def forget_samples(self) -> None:
        """Before loader workers are started."""
        self._at.fill_(-1)

    def collate(self, work: BatchSpec) -> Any:
        """The batch of a work, here and now."""
        return self._batch(LoaderRequest(_NEVER_STALE, work))

    def _batch(self, request: LoaderRequest, worker: int = -1) -> Any:
        if request.work is None or self._is_stale(request):
            return None
        epoch, indices = request.work.epoch, request.work.indices
        batch = None
        if self._reads_rows:
            batch = read_rows(self._dataset, indices)
        elif self._items is not None:
            batch = self._items.read(epoch, indices)
        if batch is None:
            batch = self._one_by_one(request, request.work, worker)
            if self._items is not None and batch is not None:
                self._items.compare(epoch, indices, batch)
        return batch

    def _one_by_one(self, request: LoaderRequest, work: BatchSpec, worker: int) -> Any:
        with generators_kept():
            samples = []
            for index in map(int, work.indices):
                if self._is_stale(request):
                    return None
                if worker >= 0:
                    self._at[worker, 0], self._at[worker, 1] = work.epoch, index
                samples.append(self._fetch(work.epoch, index))
            return self._collate(samples)

    def _is_stale(self, request: LoaderRequest) -> bool:
        return request.serial < int(self._horizon)

    def _fetch(self, epoch: int, index: int) -> Any:
        seed_for_sample(self._seed, epoch, index)
        try:
            return self._dataset[index]
        except Exception as error:
            error.add_note(f"raised by the dataset for sample {index} in epoch {epoch}")
            raise


def handed_on(answer: Answer) -> Answer:
    """The DataLoader's collate function: answers are collated already."""
    return answer


def _as_answer(error: Exception) -> ExceptionWrapper:
    info = get_worker_info()
    assert info is not None
    # torch does not say so in its types, but this is how its own loader workers hand on an error.
    wrapper = ExceptionWrapper((type(error), error, error.__traceback__), where=f"in loader worker {info.id}")  # type: ignore[no-untyped-call]
    try:
        pickle.dumps(wrapper)
    except Exception:
        # A class made inside a function cannot be named in another process; its name is in the text.
        wrapper.exc_type = RuntimeError
    return wrapper
