"""Training in steps that all workers do together: each computes its part of the same global batch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from paceline.control.machines.member_events import OperationKind
from paceline.control.messages.plan import Plan, PlanStart
from paceline.control.messages.progress import StepRow, WorkerRow
from paceline.data.cursor import advance, is_finished
from paceline.errors import NonFiniteGradient
from paceline.strategy.base import Agreement, BindPoint, Contribution
from paceline.strategy.header import HeaderRows
from paceline.strategy.sparse import Upcoming
from paceline.train.batches import Batch
from paceline.train.joining import Joined
from paceline.train.operation import Place
from paceline.train.parts import TrainingParts
from paceline.train.starvation import Starvation

if TYPE_CHECKING:
    from paceline.train.run import Run

logger = logging.getLogger("paceline.train")


class StepLoop:
    is_leased = is_open = False

    def __init__(self, run: Run, parts: TrainingParts) -> None:
        self._run = run
        self._ledger = parts.ledger
        self._batches = parts.batches
        self._sharing = parts.sharing
        self._updater = parts.updater
        self._nonfinite = parts.options.nonfinite
        self._starvation = Starvation()
        self._limit = 0  # samples that fit into memory, as was told last
        self._bound = (-1, -1)  # the generation and the swap that the strategy is bound to
        self._given: Batch | None = None  # fetched, and no step was done of it yet
        self._making: Step | None = None  # a step that counts, and that is not counted yet
        self.num_epochs = 0
        self.max_steps: int | None = None

    def connect(self, joined: Joined) -> None:
        self._joined = joined

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def batches(self, epoch: int) -> Iterator[Any]:
        ledger, length = self._ledger, self._batches.length
        while not is_finished(ledger.book.cursor, length) and not self._is_enough():
            before = ledger.book.cursor
            with self._run.going():
                self._given = self._fetch()
            yield self._given.value
            if ledger.book.cursor == before:
                raise RuntimeError("a batch was taken, but session.step was not called for it")

    def _is_enough(self) -> bool:
        return self.max_steps is not None and self._ledger.book.steps >= self.max_steps

    def _fetch(self) -> Batch:
        """This worker's part of the next global batch."""
        watch = self._sharing.watch
        watch.pause()
        plan = self._joined.membership.wait_for_plan()
        watch.resume()
        self._ledger.training.mark()
        return self.part(plan)

    def part(self, plan: Plan) -> Batch:
        """This worker's part of the global batch at the cursor, with the members of this plan."""
        book = self._ledger.book
        return self._batches.fetch(self._sharing.shares(plan, book), plan.rank_of(self._joined.member), book.cursor)

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        given, self._given = self._given, None
        if given is None or batch is not given.value:
            self._given = given
            raise RuntimeError(
                "step was called with another batch than the one that the epoch gave last; call it once for each "
                "batch, and change batches in loss_fn or collate_fn, where it can be done again"
            )
        loss: float = self._run.operate(Step(self, loss_fn, given))
        return loss

    def bind(self, place: Place) -> None:
        """Work with the group of this plan from now on."""
        book, plan = self._ledger.book, place.plan
        wanted = (plan.generation, self._ledger.num_swaps)
        if self._bound != wanted:
            self._bound = (-1, -1)
            self._sharing.rebound()
            founding = plan.generation if plan.start is PlanStart.FOUND else 0
            point = BindPoint(plan.generation, book.steps, book.settling, founding)
            self._updater.bind(place.group, place.rank, place.size, point)
            self._bound = wanted

    def attempt(self, place: Place, loss_fn: Callable[..., Any], batch: Batch, began: float) -> Agreement:
        """Compute this worker's part, and meet the others."""
        self._updater.gradients.sparse.upcoming = lambda: self._look_ahead(place, batch)
        contribution = self._compute(loss_fn, batch)
        computed = time.monotonic()
        self._compute_s = computed - began
        # First of all: what follows is not this worker's work, and neither was waiting for the statistics of others.
        busy_s = self._sharing.watch.read(self._updater.gradients.waited_s)
        notice = self._sharing.noticed(self._run.notice(place), busy_s, place.plan, self._ledger.book)
        agreement = self._updater.exchange(contribution, notice)
        self._sharing.reduced(time.monotonic() - computed)
        return agreement

    def save_if_due(self, place: Place) -> None:
        self._ledger.save_if_due(place)

    def spoil(self) -> None:
        """What is being measured is no usual step."""
        self._sharing.watch.spoil()

    def _compute(self, loss_fn: Callable[..., Any], batch: Batch) -> Contribution:
        step = self._ledger.book.steps + 1
        try:
            return self._updater.compute(loss_fn, batch.value, samples=batch.samples, total=batch.total, step=step)
        finally:
            limit, before = self._updater.gradients.limit, self._limit
            self._limit = limit
            if limit != before:
                self.spoil()
            if 0 < limit < (before or limit + 1):
                self._run.tell("out of memory", f"with {batch.samples} samples; goes on with {limit} at a time")

    def _look_ahead(self, place: Place, batch: Batch) -> Upcoming | None:
        """This worker's part of the next global batch, if shares stay as they are and it is there already."""
        book = self._ledger.book
        cursor = advance(book.cursor, batch.total, self._batches.length)
        if is_finished(cursor, self._batches.length):
            return None
        found = self._batches.look_ahead(self._sharing.shares(place.plan, book), place.rank, cursor)
        return Upcoming(found.value) if found is not None else None

    # -- a step that counts ------------------------------------------------------------------------------------------

    def commit(self, place: Place, step: Step, agreement: Agreement) -> float:
        book = self._ledger.book
        if not agreement.counts and self._nonfinite == "stop":
            raise NonFiniteGradient(f"step {book.steps + 1} (operation {place.operation}): {agreement.reason}")
        self._making = step
        self._updater.apply(agreement)
        self._making = None
        seconds = self._count(place, step, agreement)
        self._report_speed(place, step.batch, seconds)
        if (burden := self._sharing.observe(place.plan, place.rank, book, agreement.rows)) is not None:
            self._joined.client.post(burden)
        return agreement.loss

    def complete(self, step: int) -> bool:
        making, self._making = self._making, None
        if making is None or step != self._ledger.book.steps + 1 or making.agreement is None:
            return False
        assert making.place is not None
        self._updater.complete(making.agreement)
        self._count(making.place, making, making.agreement)
        return True

    def _count(self, place: Place, step: Step, agreement: Agreement) -> float:
        """The update of a step is made; how long the step took."""
        book, batch = self._ledger.book, step.batch
        cursor = book.cursor
        book.cursor = advance(cursor, batch.total, self._batches.length)
        book.steps += 1
        book.skipped += not agreement.counts
        book.loss = agreement.loss
        book.settling = agreement.settling
        if not agreement.counts:
            self._run.tell("skipped step", agreement.reason)
        seconds = time.monotonic() - step.began
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

    def _report_speed(self, place: Place, batch: Batch, seconds: float) -> None:
        row = WorkerRow(
            rank=place.rank,
            share=batch.samples,
            samples_per_s=batch.samples / self._compute_s if self._compute_s > 0 else 0.0,
            step_s=seconds,
            step=self._ledger.book.steps,
            num_epochs=self.num_epochs,
            starved=self._starvation.look(),
        )
        self._joined.client.progress.describe(row)

    # -- between epochs, and the end ---------------------------------------------------------------------------------

    def num_steps_done(self) -> int:
        return self._ledger.book.steps

    def refresh(self) -> None:
        """All workers have the same model after every step."""

    def save_at_end(self, place: Place) -> None:
        self._ledger.save_at_end(place)

    def num_leases_done(self) -> int:
        return 0

    @property
    def lr_factor(self) -> float:
        return 1.0

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        if factor != 1.0:
            logger.warning("lr_factor has no effect where all workers step together")


class Step:
    """One step, an operation of all workers. After a death it is attempted again, with this worker's new part of the
    same global batch."""

    kind = OperationKind.STEP

    def __init__(self, loop: StepLoop, loss_fn: Callable[..., Any], given: Batch) -> None:
        self._loop = loop
        self._loss_fn = loss_fn
        self.batch = given
        self.began = time.monotonic()
        self.place: Place | None = None
        self.agreement: Agreement | None = None

    def prepare(self, plan: Plan) -> None:
        self._loop.spoil()
        self.batch = self._loop.part(plan)

    def attempt(self, place: Place) -> HeaderRows:
        self._loop.bind(place)
        self._loop.save_if_due(place)
        if self.batch.generation != place.plan.generation:
            self.batch = self._loop.part(place.plan)
        self.place = place
        self.agreement = self._loop.attempt(place, self._loss_fn, self.batch, self.began)
        return place.checked(self.agreement.rows)

    def commit(self, place: Place) -> float:
        assert self.agreement is not None
        return self._loop.commit(place, self, self.agreement)
