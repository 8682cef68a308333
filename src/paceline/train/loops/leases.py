"""Training without a global step: each worker takes the next lease, computes, and hands its gradients to the servers.

    begin(epoch)         ask for leases of an epoch
    fetch()              the samples of the next lease, when the servers' parameters are here; or why there is none
    step(loss_fn, ...)   compute, push, and pull what the next one needs

One lease is one update from `global_batch` samples. It counts once on every range of the parameters, whoever brings it
and however often. The group and its operations are for what lies between epochs; who joins or leaves meanwhile does
so between two leases of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import msgspec

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.machines.member_events import Looping
from paceline.control.messages.plan import PlanStart
from paceline.control.messages.progress import WorkerRow
from paceline.data.cursor import Cursor
from paceline.errors import NonFiniteGradient
from paceline.server.messages import ApplyLease, Need
from paceline.strategy.aggregation import BindPoint
from paceline.strategy.consistency import Consistency
from paceline.strategy.served import ServerAggregation
from paceline.strategy.sparse import Upcoming
from paceline.strategy.synchronous import Synchronous
from paceline.train.batches import Batch, GlobalBatches
from paceline.train.headers import all_texts
from paceline.train.joining import Joined
from paceline.train.lease_queue import LeaseEnd, LeaseQueue
from paceline.train.ledger import TrainingLedger
from paceline.train.membership import Place
from paceline.train.schedules import Schedules
from paceline.wire.decoding import decode

_LOOK_S = 0.1


class Taken(NamedTuple):
    """A lease that this worker is at, with its samples."""

    lease: int
    batch: Batch


class LeaseLoop:
    """`nonfinite` says what becomes of a lease with a gradient that is not finite: it ends the run, or counts without
    changing anything."""

    def __init__(
        self,
        joined: Joined,
        leases: LeaseQueue,
        ledger: TrainingLedger,
        batches: GlobalBatches,
        strategy: Synchronous,
        served: ServerAggregation,
        consistency: Consistency,
        schedules: Schedules,
        nonfinite: Literal["stop", "skip"],
        tell: Callable[[str, str], None],
    ) -> None:
        self._joined = joined
        self._leases = leases
        self._ledger = ledger
        self._batches = batches
        self._strategy = strategy
        self._served = served
        self._served.num_leases = batches.num_steps
        self._served.client.settled = lambda: leases.settled
        self._bound = consistency.bound
        self._schedules = schedules
        self._nonfinite = nonfinite
        self._tell = tell
        self._epoch = -1
        self._num_leases = 0  # of this epoch
        self._has_bound = -1  # the number of swaps that the strategy was bound after
        self._pulled = False  # what was pulled with the last push suffices
        self._began = 0.0
        self._lease = -1  # the last one that was taken
        self.finished_epoch = -1  # the last one of which all leases are done
        self.num_epochs = 0
        self.lr_factor = 1.0
        self.is_open = False  # leases of an epoch are being done

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def begin(self, epoch: int, max_steps: int | None) -> None:
        self.is_open = True
        if self._has_bound != self._ledger.num_swaps:
            self._schedules.begin(self._ledger.book.num_scheduled)  # those of the state that was received
        elif epoch != self._epoch:
            self._schedules.begin()
        self._epoch = epoch
        cursor = self._ledger.book.cursor
        self._num_leases = self._ledger.book.num_steps_of_epoch(self._batches.num_steps, max_steps)
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
            self._strategy.bind(None, 0, 1, BindPoint(founding=founding))
            self._has_bound = self._ledger.num_swaps
            self._pulled = False

    def fetch(self) -> Taken | LeaseEnd:
        """The next lease, or why there is none."""
        if self._began:
            self._schedules.body_ran(self._lease)
            self._ledger.book.num_scheduled = self._schedules.num_moved
            self._began = 0.0
        while True:
            self._joined.membership.attend()
            self._save_if_due()
            if self._joined.client.look(lambda machine: machine.leaving):
                self._leases.leave()
            turn = self._leases.next(_LOOK_S)
            if isinstance(turn, LeaseEnd):
                self.is_open = False
                if turn is LeaseEnd.FINISHED:
                    self.finished_epoch = self._epoch
                    self._ledger.leased(self._ledger.book.steps_before + self._num_leases)
                    self._schedules.end(self._num_leases)
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
        return self._served.pull(need, self._leases.gives_way)

    # -- a lease -----------------------------------------------------------------------------------------------------

    def step(self, loss_fn: Callable[..., Any], taken: Taken) -> float:
        batch, lease = taken.batch, taken.lease
        number = self._epoch * self._batches.num_steps + lease + 1
        self._strategy.sparse.upcoming = lambda: self._look_ahead(lease)
        contribution = self._strategy.compute(
            loss_fn, batch.value, samples=batch.samples, total=batch.total, step=number
        )
        computed = time.monotonic()
        own = self._strategy.judge_own(contribution)
        if not own.is_finite and self._nonfinite == "stop":
            raise NonFiniteGradient(f"epoch {self._epoch}, lease {lease}: {own.reason}")
        if not own.is_finite:
            self._tell("skipped step", own.reason)
        push = ApplyLease(self._epoch, lease, number, own.factor, is_void=not own.is_finite)
        self._served.push(push, own.rows, own.used, self.lr_factor)
        self._pulled = True
        seconds = time.monotonic() - self._began
        self._leases.finish(lease, own.loss, seconds)
        self._ledger.leased(self._ledger.book.steps_before + lease + 1)
        self._report_speed(batch.samples, computed - self._began, seconds)
        return own.loss

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
        self._ledger.save_leases_if_due(self.num_done())

    def save_at_end(self, place: Place) -> None:
        """When every worker has handed over its last lease."""
        told = all_texts(place, msgspec.msgpack.encode(self._leases.known_done(max(0, self._epoch))))
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
            settled = self._num_leases if self.finished_epoch == self._epoch else 0
            self._served.pull(Need(epoch=self._epoch, prefix=settled, settled=settled))

    def num_done(self) -> int:
        """Updates that are known to be done everywhere."""
        return max(0, self._epoch) * self._batches.num_steps + self._leases.settled
