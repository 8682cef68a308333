"""Training without a global step: each worker takes the next lease, computes, and hands its gradients to the servers.

One lease is one update from `global_batch` samples. It counts once on every range of the parameters, whoever brings it
and however often. The group and its operations are for what lies between epochs; who joins or leaves meanwhile does
so between two leases of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.machines.member_events import Looping, OperationKind
from paceline.control.messages.plan import Plan, PlanStart
from paceline.control.messages.progress import WorkerRow
from paceline.control.shell.client import MemberClient
from paceline.data.cursor import Cursor, num_steps
from paceline.errors import NonFiniteGradient
from paceline.server.messages import Need
from paceline.strategy.base import BindPoint, Notice
from paceline.strategy.header import HeaderRows
from paceline.strategy.served_leases import ServerLeases
from paceline.strategy.sparse import Upcoming
from paceline.train.batches import Batch
from paceline.train.joining import Joined
from paceline.train.lease_queue import LeaseEnd, LeaseQueue
from paceline.train.operation import Place
from paceline.train.parts import TrainingParts
from paceline.watch import spans
from paceline.wire.decoding import decode

if TYPE_CHECKING:
    from paceline.train.run import Run

_LOOK_S = 0.1


class Taken(NamedTuple):
    """A lease that this worker is at, with its samples."""

    lease: int
    batch: Batch


class LeaseLoop:
    is_leased = True

    def __init__(self, run: Run, parts: TrainingParts) -> None:
        strategy = parts.updater.strategy
        assert isinstance(strategy, ServerLeases)
        self._strategy = strategy
        self._served = strategy.served
        self._run = run
        self._ledger = parts.ledger
        self._batches = parts.batches
        self._updater = parts.updater
        self._schedules = parts.schedules
        self._bound = parts.options.mode.bound
        self._nonfinite = parts.options.nonfinite
        self._epoch = -1
        self._num_leases = 0  # of this epoch
        self._has_bound = -1  # the number of swaps that the strategy was bound after
        self._pulled = False  # what was pulled with the last push suffices
        self._began = 0.0
        self._taken: Taken | None = None  # no step was done of it yet
        self._lease = -1  # the last one that was taken
        self._finished_epoch = -1  # the last one of which all leases are done
        self.num_epochs = 0
        self.max_steps: int | None = None
        self.is_open = False  # leases of an epoch are being done

    def connect(self, joined: Joined) -> None:
        assert isinstance(joined.client, MemberClient)
        self._joined = joined
        self._leases = leases = LeaseQueue(joined.member, joined.client.speak)
        joined.client.leases = leases
        self._served.num_leases = self._batches.num_steps
        self._served.client.settled = lambda: leases.settled

    @property
    def lr_factor(self) -> float:
        return self._strategy.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        self._strategy.lr_factor = factor

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def batches(self, epoch: int) -> Iterator[Any]:
        self._begin(epoch)
        while (taken := self._fetch()) is not None:
            self._taken = taken
            yield taken.batch.value
            if self._taken is not None:
                raise RuntimeError("a batch was taken, but session.step was not called for it")

    def _begin(self, epoch: int) -> None:
        """Ask for leases of an epoch."""
        self.is_open = True
        if self._has_bound != self._ledger.num_swaps:
            self._schedules.begin(self._ledger.book.num_scheduled)  # those of the state that was received
        elif epoch != self._epoch:
            self._schedules.begin()
        self._epoch = epoch
        cursor = self._ledger.book.cursor
        self._num_leases = self._ledger.book.num_steps_of_epoch(self._batches.num_steps, self.max_steps)
        if cursor.epoch == epoch and cursor.position:
            self._served.begin_after(LeaseSet(epoch, cursor.position // self._batches.global_batch))
        self._bind()
        self._joined.client.post(Looping())
        begun = self._served.begun_in(epoch)
        self._leases.open(epoch, self._num_leases, begun, self._batches.global_batch, self._batches.length)

    def _bind(self) -> None:
        if self._has_bound != self._ledger.num_swaps:
            plan = self._joined.membership.wait_for_plan()
            founding = plan.generation if plan.start is PlanStart.FOUND else 0
            self._updater.bind(None, 0, 1, BindPoint(founding=founding))
            self._has_bound = self._ledger.num_swaps
            self._pulled = False

    def _fetch(self) -> Taken | None:
        """The next lease; None at the end of the epoch."""
        with self._run.going():
            taken = self._next()
        if isinstance(taken, Taken):
            return taken
        if taken is LeaseEnd.STOPPED:
            self._run.end()
        self._run.operate(EpochRefresh(self))
        return None

    def _next(self) -> Taken | LeaseEnd:
        """The next lease, when the servers' parameters are here; or why there is none."""
        if self._began:
            self._schedules.body_ran(self._lease)
            self._ledger.book.num_scheduled = self._schedules.num_moved
            self._began = 0.0
        while True:
            self._joined.membership.attend()
            self._save_if_due()
            if self._joined.client.look(lambda machine: machine.leaving):
                self._leases.leave()
            before = spans.mark("leases")
            turn = self._leases.next(_LOOK_S)
            spans.mark(before)
            if isinstance(turn, LeaseEnd):
                self.is_open = False
                if turn is LeaseEnd.FINISHED:
                    self._finished_epoch = self._epoch
                    self._ledger.leased(self._ledger.book.steps_before + self._num_leases)
                    self._schedules.end(self._num_leases)
                    self._ledger.book.num_scheduled = self._schedules.num_moved  # for one that gets the state now
                return turn
            if turn is not None and self._pull(turn):
                # What was pulled has all leases below the bound, also if the coordinator has not said so yet.
                self._schedules.move_on(max(self._leases.settled, self._need(turn).prefix))
                self._ledger.book.num_scheduled = self._schedules.num_moved
                self._lease = turn
                self._ledger.training.mark()
                self._began = time.monotonic()
                return Taken(turn, self._batches.fetch_whole(Cursor(self._epoch, turn * self._batches.global_batch)))

    def end_epoch(self) -> None:
        """All workers have heard that its leases are done."""
        self._ledger.book.cursor = Cursor(
            self._epoch, min(self._num_leases * self._batches.global_batch, self._batches.length)
        )

    def _need(self, lease: int) -> Need:
        prefix = max(0, lease - self._bound) if self._bound >= 0 else 0
        return Need(epoch=self._epoch, prefix=prefix, settled=self._leases.settled)

    def _pull(self, lease: int) -> bool:
        """Have parameters that this lease may be computed with; False if an earlier lease, or the end, comes first."""
        need = self._need(lease)
        if self._pulled and need.prefix == 0:
            self._served.rely_on(need)
            return True
        return self._strategy.pull(need, self._leases.gives_way)

    # -- a lease -----------------------------------------------------------------------------------------------------

    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        taken = self._taken
        if taken is None or batch is not taken.batch.value:
            raise RuntimeError(
                "step was called with another batch than the one that the epoch gave last; call it once for each "
                "batch, and change batches in loss_fn or collate_fn, where it can be done again"
            )
        self._taken = None
        with self._run.going():
            return self._step(loss_fn, taken)

    def _step(self, loss_fn: Callable[..., Any], taken: Taken) -> float:
        batch, lease = taken.batch, taken.lease
        number = self._epoch * self._batches.num_steps + lease + 1
        self._strategy.begin(self._epoch, lease, number)
        self._updater.gradients.sparse.upcoming = lambda: self._look_ahead(lease)
        contribution = self._updater.compute(
            loss_fn, batch.value, samples=batch.samples, total=batch.total, step=number
        )
        computed = time.monotonic()
        agreement = self._updater.exchange(contribution, Notice(number))
        if agreement.counts:
            self._updater.apply(agreement)
        elif self._nonfinite == "stop":
            raise NonFiniteGradient(f"epoch {self._epoch}, lease {lease}: {agreement.reason}")
        else:
            self._run.tell("skipped step", agreement.reason)
            self._strategy.void()
        self._pulled = True
        seconds = time.monotonic() - self._began
        self._leases.finish(lease, agreement.loss, seconds)
        self._ledger.leased(self._ledger.book.steps_before + lease + 1)
        self._report_speed(batch.samples, computed - self._began, seconds)
        return agreement.loss

    def _look_ahead(self, lease: int) -> Upcoming | None:
        """The batch of the lease after this one, unless that needs to see this one, which is not done yet."""
        following = self._leases.following
        if following < 0 or self._need(following).prefix > lease:
            return None
        cursor = Cursor(self._epoch, following * self._batches.global_batch)
        found = self._batches.look_ahead_whole(cursor)
        return Upcoming(found.value, self._need(following)) if found is not None else None

    def _report_speed(self, samples: int, compute_s: float, seconds: float) -> None:
        plan = self._joined.client.look(lambda machine: machine.plan)
        row = WorkerRow(
            rank=plan.rank_of(self._joined.member) if plan is not None else -1,
            share=samples,
            samples_per_s=samples / compute_s if compute_s > 0 else 0.0,
            step_s=seconds,
            step=self._ledger.book.steps,
            num_epochs=self.num_epochs,
        )
        self._joined.client.progress.describe(row)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self) -> None:
        plan = self._joined.client.look(lambda machine: machine.plan)
        if plan is None or plan.rank_of(self._joined.member) != 0:
            return
        self._ledger.save_leases_if_due(self.num_leases_done())

    def save_at_end(self, place: Place) -> None:
        """When every worker has handed over its last lease."""
        told = place.all_texts(msgspec.msgpack.encode(self._leases.known_done(max(0, self._epoch))))
        if place.rank == 0:
            done = LeaseSet()
            for text in told:
                done.update(decode(text, LeaseSet))
            if number := done.epoch * self._batches.num_steps + len(done):
                self._ledger.save_leases_at_end(number)
        self.refresh()

    def refresh(self) -> None:
        """Have the parameters of the servers, where nobody is at a lease: with all that was done, and the same on all
        workers."""
        if self._epoch >= 0:
            settled = self._num_leases if self._finished_epoch == self._epoch else 0
            self._strategy.pull(Need(epoch=self._epoch, prefix=settled, settled=settled))

    def num_leases_done(self) -> int:
        if self._epoch < 0:
            return 0
        return self._epoch * self._batches.num_steps + self._leases.settled

    def num_steps_done(self) -> int:
        """The cursor says which leases all workers have."""
        book = self._ledger.book
        return book.steps_before + num_steps(book.cursor.position, self._batches.global_batch)

    def exchange(self, place: Place) -> HeaderRows:
        return self._run.exchange(place)

    def complete(self, step: int) -> bool:
        return False


class EpochRefresh:
    """An epoch of leases ends: all workers get the same model, before any of them begins the next epoch."""

    kind = OperationKind.REFRESH

    def __init__(self, loop: LeaseLoop) -> None:
        self._loop = loop

    def attempt(self, place: Place) -> HeaderRows:
        self._loop.refresh()
        return self._loop.exchange(place)

    def prepare(self, plan: Plan) -> None:
        """Nothing takes time."""

    def commit(self, place: Place) -> None:
        self._loop.end_epoch()
