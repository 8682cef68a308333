"""This worker's part of each global batch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from paceline.balance import Shares
from paceline.data.cursor import Cursor, batch_size, num_steps
from paceline.data.loader import Loader, LoaderOptions
from paceline.data.order import Order, Orders
from paceline.data.split import split, split_among_all
from paceline.data.window import BatchSpec
from paceline.errors import LoaderError
from paceline.train.sampling import Sampling
from paceline.watch import spans


class Batch(NamedTuple):
    """A part of a global batch, collated. `value` is None where it has no samples."""

    work: BatchSpec
    value: Any
    samples: int
    total: int

    @property
    def generation(self) -> int:
        """Of the plan that it is a part for."""
        return self.work.tag[0]


class GlobalBatches:
    """`min_share` keeps workers from getting a single sample where the model cannot take one. Each batch is `among_all`
    where its workers need each other: no worker is without samples, or all but one are. `on_death` hears of every
    loader worker that died."""

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        seed: int,
        shuffle: bool,
        order: Order | None,
        options: LoaderOptions,
        min_share: int,
        among_all: bool = False,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self._loader = Loader(dataset, seed=seed, options=options, on_death=on_death)
        self.length = self._loader.length
        if type(global_batch) is not int or not 1 <= global_batch <= self.length:
            raise ValueError(
                f"global_batch={global_batch} must be from 1 to the {self.length} samples of the data; "
                "it is the number of samples of one step over all workers"
            )
        self.global_batch = global_batch
        self._orders = Orders(seed=seed, length=self.length, shuffle=shuffle, order=order, stride=global_batch)
        self.sampling = Sampling(global_batch, self._orders.describe(), self.length)
        self.num_steps = num_steps(self.length, global_batch)
        divide = split_among_all if among_all else functools.partial(split, minimum=min_share)
        self._split = functools.lru_cache(maxsize=4)(
            divide
        )  # of a whole batch and of an epoch's last, before and after
        self._ahead: Batch | None = None  # the one that comes next, as it seemed

    def look_ahead(self, shares: Shares, rank: int, cursor: Cursor) -> Batch | None:
        """The part that will be fetched next, if nothing changes, where it takes no waiting to have it now."""
        return self._keep(lambda: self.fetch(shares, rank, cursor))

    def look_ahead_whole(self, cursor: Cursor) -> Batch | None:
        if self._loader.has_workers:
            return None  # they are asked for one batch at a time, so nothing lies there ahead
        return self._keep(lambda: self.fetch_whole(cursor))

    def _keep(self, fetch: Callable[[], Batch]) -> Batch | None:
        if not self._loader.is_ready:
            return None
        try:
            self._ahead = fetch()
        except LoaderError:
            raise
        except Exception:  # of the data set: it will be raised when this batch is asked for
            self._ahead = None
        return self._ahead

    def _kept(self, work: BatchSpec) -> Batch | None:
        kept, self._ahead = self._ahead, None
        return kept if kept is not None and kept.work.same_as(work) else None

    def fetch(self, shares: Shares, rank: int, cursor: Cursor) -> Batch:
        """The part of a rank in the global batch at the cursor; those that follow are collated meanwhile."""
        before = spans.mark("data")
        work = self._work(shares, rank, cursor)
        assert work is not None
        if (kept := self._kept(work)) is not None:
            spans.mark(before)
            return kept

        def following(ahead: int) -> BatchSpec | None:
            position = cursor.position + ahead * self.global_batch
            if position < self.length:
                return self._work(shares, rank, Cursor(cursor.epoch, position))
            # The next epoch begins where this one ends.
            into_next = (position - self.num_steps * self.global_batch) // self.global_batch
            if into_next >= self.num_steps:
                return None
            return self._work(shares, rank, Cursor(cursor.epoch + 1, into_next * self.global_batch))

        value = self._loader.fetch(work, following)
        spans.mark(before)
        return Batch(work, value, len(work.indices), self.total(cursor))

    def fetch_whole(self, cursor: Cursor) -> Batch:
        """The global batch at the cursor, for one worker alone; which one comes next is not known."""
        total = self.total(cursor)
        indices = self._orders.slice(cursor.epoch, cursor.position, cursor.position + total)
        work = BatchSpec(
            (0, cursor.epoch * self.num_steps + cursor.position // self.global_batch), cursor.epoch, indices
        )
        if (kept := self._kept(work)) is not None:
            return kept
        before = spans.mark("data")
        value = self._loader.fetch(work, lambda _: None)
        spans.mark(before)
        return Batch(work, value, total, total)

    def total(self, cursor: Cursor) -> int:
        return batch_size(cursor.position, self.global_batch, self.length)

    def _work(self, shares: Shares, rank: int, cursor: Cursor) -> BatchSpec | None:
        part = self._split(self.total(cursor), shares.parts)[rank]
        indices = self._orders.slice(cursor.epoch, cursor.position + part.start, cursor.position + part.stop)
        # Tagged by position, not by operation: how many operations lie between two steps is the user's affair.
        return BatchSpec(
            (shares.generation, cursor.epoch * self.num_steps + cursor.position // self.global_batch),
            cursor.epoch,
            indices,
            shares.version,
        )

    def walk(self, shares: Shares, rank: int) -> Iterator[tuple[Any, int]]:
        """All of a rank's part of one pass over the data in consecutive pieces, with their numbers of samples."""
        part = split(self.length, shares.parts)[rank]
        starts = range(part.start, part.stop, self.global_batch)

        def work(number: int) -> BatchSpec | None:
            if number >= len(starts):
                return None
            stop = min(starts[number] + self.global_batch, part.stop)
            return BatchSpec((shares.generation, number), 0, self._orders.slice(0, starts[number], stop))

        for number in range(len(starts)):
            wanted = work(number)
            assert wanted is not None
            yield self._loader.fetch(wanted, functools.partial(_ahead, work, number)), len(wanted.indices)

    def close(self) -> None:
        self._loader.close()


MOST_VALIDATION = 4  # sets of validation data that have loader workers


class ValidationData:
    """The data that a script validates on. Loader workers for it live as long as the session, like those for
    training; of a script that makes its data anew every time, those for the last few."""

    def __init__(self, seed: int, options: LoaderOptions, on_death: Callable[[str], None] | None = None) -> None:
        self._seed = seed
        self._options = options
        self._on_death = on_death
        self._known: dict[int, tuple[Any, GlobalBatches]] = {}  # holds the data, so that its id stays its own

    def parts_of(self, data: Any, size: int) -> GlobalBatches:
        """The parts of this data in global batches of this size, or of all of it if it has fewer samples."""
        known = self._known.pop(id(data), None)
        if known is None or known[1].global_batch != min(size, len(data)):
            if known is not None:
                known[1].close()
            parts = GlobalBatches(
                data,
                global_batch=min(size, len(data)),
                seed=self._seed,
                shuffle=False,
                order=None,
                options=self._options,
                min_share=1,
                on_death=self._on_death,
            )
            known = (data, parts)
        self._known[id(data)] = known  # behind those that were used before
        while len(self._known) > MOST_VALIDATION:
            self._known.pop(next(iter(self._known)))[1].close()
        return known[1]

    def close(self) -> None:
        for _, parts in self._known.values():
            parts.close()


def _ahead(work: Callable[[int], BatchSpec | None], number: int, ahead: int) -> BatchSpec | None:
    return work(number + ahead)
