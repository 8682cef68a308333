"""Training in steps that all workers do together: each computes its part of the same global batch.

fetch()             this worker's part of the next global batch
prepare(plan)       a step is done again with whoever is left: its new part of the same batch
attempt(...)        compute, exchange, and say what is to be done when the step counts
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from paceline.control.messages.plan import Plan, PlanStart
from paceline.control.messages.progress import StepRow, WorkerRow
from paceline.data.cursor import advance, is_finished
from paceline.errors import NonFiniteGradient
from paceline.strategy import Agreement, Contribution, Updater
from paceline.strategy.aggregation import BindPoint
from paceline.strategy.sparse import Upcoming
from paceline.train.batches import Batch, GlobalBatches
from paceline.train.headers import Headers
from paceline.train.joining import Joined
from paceline.train.ledger import TrainingLedger
from paceline.train.membership import Attempt, Place
from paceline.train.sharing import Sharing
from paceline.train.starvation import Starvation


class StepLoop:
    """`nonfinite` says what becomes of a step with a gradient that is not finite: it ends the run, or counts without
    changing anything. `given` is the batch that was fetched and of which no step was done yet."""

    def __init__(
        self,
        join: Callable[[], Joined],
        headers: Headers,
        ledger: TrainingLedger,
        batches: GlobalBatches,
        strategy: Updater,
        sharing: Sharing,
        nonfinite: Literal["stop", "skip"],
        tell: Callable[[str, str], None],
    ) -> None:
        self._join = join
        self._headers = headers
        self._ledger = ledger
        self._batches = batches
        self._strategy = strategy
        self._sharing = sharing
        self._nonfinite = nonfinite
        self._tell = tell
        self._starvation = Starvation()
        self._limit = 0  # samples that fit into memory, as was told last
        self._bound = (-1, -1)  # the generation and the swap that the strategy is bound to
        self._prepared: Batch | None = None
        self._making: tuple[int, Callable[[], None]] | None = None  # a step that counts, and how to count it
        self.given: Batch | None = None
        self.num_epochs = 0

    # -- batches -----------------------------------------------------------------------------------------------------

    def fetch(self) -> Any:
        """This worker's part of the next global batch."""
        joined = self._join()
        self._sharing.watch.pause()
        plan = joined.membership.wait_for_plan()
        self._sharing.watch.resume()
        self._ledger.training.mark()
        self.given = self._part(plan, plan.rank_of(joined.member))
        return self.given.value

    def take(self, value: Any) -> Batch:
        """The batch that was fetched, of which this is the value: its step begins."""
        given = self.given
        if given is None or value is not given.value:
            raise RuntimeError(
                "step was called with another batch than the one that the epoch gave last; call it once for each "
                "batch, and change batches in loss_fn or collate_fn, where it can be done again"
            )
        self.given = self._prepared = None
        return given

    def prepare(self, plan: Plan) -> None:
        """The step will be done again with whoever is left: this worker's new part of the batch."""
        self._sharing.watch.spoil()
        self._prepared = self._part(plan, plan.rank_of(self._join().member))

    def _part(self, plan: Plan, rank: int) -> Batch:
        book = self._ledger.book
        return self._batches.fetch(self._sharing.shares(plan, book), rank, book.cursor)

    def _look_ahead(self, place: Place, batch: Batch) -> Upcoming | None:
        """This worker's part of the next global batch, if shares stay as they are and it is there already."""
        book = self._ledger.book
        cursor = advance(book.cursor, batch.total, self._batches.length)
        if is_finished(cursor, self._batches.length):
            return None
        found = self._batches.look_ahead(self._sharing.shares(place.plan, book), place.rank, cursor)
        return Upcoming(found.value) if found is not None else None

    # -- a step ------------------------------------------------------------------------------------------------------

    def attempt(self, place: Place, loss_fn: Callable[..., Any], given: Batch, began: float) -> Attempt:
        self._bind(place)
        self._ledger.save_if_due(place)
        ready = (one for one in (given, self._prepared) if one is not None and one.generation == place.plan.generation)
        batch = next(ready, None) or self._part(place.plan, place.rank)
        self._prepared = None
        self._strategy.sparse.upcoming = lambda: self._look_ahead(place, batch)
        contribution = self._compute(loss_fn, batch)
        computed = time.monotonic()
        # First of all: what follows is not this worker's work, and neither was waiting for the statistics of others.
        busy_s = self._sharing.watch.read(self._strategy.waited_s)
        notice = self._sharing.noticed(self._headers.notice(place), busy_s, place.plan, self._ledger.book)
        agreement = self._strategy.reduce(contribution, notice)
        self._sharing.reduced(time.monotonic() - computed)
        return self._headers.outcome(
            place, agreement.rows, lambda: self._commit(place, agreement, batch, computed - began, began)
        )

    def _bind(self, place: Place) -> None:
        wanted = (place.plan.generation, self._ledger.num_swaps)
        if self._bound != wanted:
            self._bound = (-1, -1)
            self._sharing.rebound()
            self._strategy.bind(place.group, place.rank, place.size, self._standing(place.plan))
            self._bound = wanted

    def _standing(self, plan: Plan) -> BindPoint:
        book = self._ledger.book
        founding = plan.generation if plan.start is PlanStart.FOUND else 0
        return BindPoint(plan.generation, book.steps, book.settling, founding)

    def _compute(self, loss_fn: Callable[..., Any], batch: Batch) -> Contribution:
        try:
            return self._strategy.compute(
                loss_fn, batch.value, samples=batch.samples, total=batch.total, step=self._ledger.book.steps + 1
            )
        finally:
            limit, before = self._strategy.limit, self._limit
            self._limit = limit
            if limit != before:
                self._sharing.watch.spoil()
            if 0 < limit < (before or limit + 1):
                self._tell("out of memory", f"with {batch.samples} samples; goes on with {limit} at a time")

    def _commit(self, place: Place, agreement: Agreement, batch: Batch, compute_s: float, began: float) -> float:
        book = self._ledger.book
        if not agreement.counts and self._nonfinite == "stop":
            raise NonFiniteGradient(f"step {book.steps + 1} (operation {place.operation}): {agreement.reason}")
        self._making = book.steps + 1, lambda: self._complete(place, agreement, batch, began)
        self._strategy.apply(agreement)
        self._making = None
        seconds = self._count(place, agreement, batch, began)
        self._report_speed(place, batch, compute_s, seconds)
        if (burden := self._sharing.observe(place.plan, place.rank, book, agreement.rows)) is not None:
            self._join().client.post(burden)
        self._ledger.keep_result(place.operation, agreement.loss, self._headers.stopping_agreed)
        return agreement.loss

    def complete(self, step: int) -> bool:
        """Servers have made this step after all, of which this worker was told that it counts before it had to give up:
        count it. Whether that was so."""
        making, self._making = self._making, None
        if making is None or not making[0] == step == self._ledger.book.steps + 1:
            return False
        making[1]()
        return True

    def _complete(self, place: Place, agreement: Agreement, batch: Batch, began: float) -> None:
        self._strategy.complete(agreement)
        self._count(place, agreement, batch, began)

    def _count(self, place: Place, agreement: Agreement, batch: Batch, began: float) -> float:
        """The update of a step is made; how long the step took."""
        book = self._ledger.book
        cursor = book.cursor
        book.cursor = advance(cursor, batch.total, self._batches.length)
        book.steps += 1
        book.skipped += not agreement.counts
        book.loss = agreement.loss
        book.settling = agreement.settling
        if not agreement.counts:
            self._tell("skipped step", agreement.reason)
        seconds = time.monotonic() - began
        self._ledger.stepped(
            StepRow(
                operation=place.operation,
                generation=place.plan.generation,
                epoch=cursor.epoch,
                position=cursor.position,
                count=batch.total,
                loss=agreement.loss,
                seconds=seconds,
                time=time.time(),
            )
        )
        return seconds

    def _report_speed(self, place: Place, batch: Batch, compute_s: float, seconds: float) -> None:
        speed = batch.samples / compute_s if compute_s > 0 else 0.0
        row = WorkerRow(
            rank=place.rank,
            share=batch.samples,
            samples_per_s=speed,
            step_s=seconds,
            step=self._ledger.book.steps,
            num_epochs=self.num_epochs,
            starved=self._starvation.look(),
        )
        self._join().client.progress.describe(row)
