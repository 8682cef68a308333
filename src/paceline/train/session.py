"""The session: what a training script calls.

    session = paceline.Session(model, optimizer, schedule, data=train_set, global_batch=256, seed=0)
    for epoch in session.epochs(3):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            schedule.step()
        scores = session.evaluate(validate, valid_set)
        if session.should_stop(scores["loss"], patience=2):
            break

The body of the loop runs once for each committed step on every worker, whatever happens meanwhile. What is done again
after a loss is `loss_fn` (and `validate`), with this worker's new part of the same global batch.

Contract
- `step`, `evaluate`, `score` and `should_stop` are operations: every worker does the same ones in the same order. They
  return when the operation counts, with the same result on all.
- A worker that joins later runs the script from its top. It gets the state when it asks for its first epoch, enters
  the loop at the step that comes next, and gets recorded results for operations outside of the loops.
- At a clean point (just before a step) workers join and leave, checkpoints are taken, the run stops if asked to.
- An exception of the script ends this worker; the others go on without it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from torch import nn

from paceline.balance.minimum import ANY, WITH_STATISTICS
from paceline.control.exit_codes import HALTED, START_AGAIN
from paceline.control.machines.member_events import Fail, Leave, MemberReady, OperationKind
from paceline.control.messages import losses
from paceline.control.messages.plan import Phase, Plan
from paceline.control.shell.client import MemberClient
from paceline.custody.moving import Unreached
from paceline.data.cursor import is_finished, num_steps
from paceline.data.dataset import fingerprint
from paceline.data.loader import LoaderOptions
from paceline.data.order import Order
from paceline.errors import Evicted, Orphaned
from paceline.nn.embedding import Table
from paceline.server.client import GroupClient
from paceline.strategy import Synchronous
from paceline.strategy.batch_norm import BatchNormName
from paceline.strategy.options import NonFinite, SessionOptions, StrategyName
from paceline.strategy.served import ServerAggregation
from paceline.train import joining, saving
from paceline.train.batches import GlobalBatches, ValidationData
from paceline.train.book import Mode
from paceline.train.endings import Endings
from paceline.train.evaluation import Validate
from paceline.train.evaluator import Evaluator
from paceline.train.folder_claim import FolderClaim
from paceline.train.frames import boundary, boundary_of_loop
from paceline.train.halting import Halting
from paceline.train.headers import Headers
from paceline.train.lease_queue import LeaseEnd, LeaseQueue
from paceline.train.ledger import END, TrainingLedger
from paceline.train.loops.leases import LeaseLoop, Taken
from paceline.train.loops.steps import StepLoop
from paceline.train.membership import Attempt, Place, Released
from paceline.train.run_log import RUN_LOG
from paceline.train.saving import Checkpoints, Saver
from paceline.train.schedules import Schedules
from paceline.train.sharing import Sharing
from paceline.train.strategies import aggregate_for
from paceline.train.training_state import Stateful, TrainingState
from paceline.wire.identity import Identity

logger = logging.getLogger("paceline.train")


class Session:
    """One training of a model: alone, or together with the other workers of a run.

    >>> session = paceline.Session(model, optimizer, data=data, global_batch=256)
    >>> for epoch in session.epochs(3):
    ...     for batch in epoch:
    ...         loss = session.step(loss_fn, batch)

    `stateful` are optimizers, schedules and whatever else has a state_dict. `global_batch` is the number of samples of
    a step over all workers, however many there are. `SessionOptions` explains the other settings."""

    @boundary
    def __init__(
        self,
        model: nn.Module,
        *stateful: Stateful,
        data: Any,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        loader: LoaderOptions = LoaderOptions(),
        micro_batch: int | None = None,
        clip_norm: float | None = None,
        nonfinite: NonFinite = "stop",
        checkpoints: Checkpoints = Checkpoints(),
        strategy: StrategyName = "allreduce",
        consistency: str = "sync",
        batch_norm: BatchNormName = "local",
    ) -> None:
        options = SessionOptions(
            seed=seed,
            shuffle=shuffle,
            order=order,
            loader=loader,
            micro_batch=micro_batch,
            clip_norm=clip_norm,
            nonfinite=nonfinite,
            strategy=strategy,
            consistency=consistency,
            batch_norm=batch_norm,
        )
        if not isinstance(checkpoints, Checkpoints):
            raise TypeError(f"checkpoints={checkpoints!r}: give a Checkpoints")
        optimizers, others = _told_apart(stateful)
        self._model = model
        self._options = options
        self._ticket = joining.find_ticket()
        is_alone = self._ticket is None
        self._strategy = Synchronous(
            model,
            optimizers,
            options,
            check=self._check,
            aggregate=aggregate_for(options, optimizers, self._tell, self._recall, self._is_loader, is_alone=is_alone),
        )
        minimum = WITH_STATISTICS if self._strategy.needs_two_samples() else ANY
        self._batches = GlobalBatches(
            data,
            global_batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            order=order,
            options=loader,
            min_share=minimum.fewest,
            among_all=batch_norm == "sync",
            on_death=self._tell_death,
        )
        self._sharing = Sharing(global_batch, minimum, self._tell)
        self._facts = {
            "dataset_length": str(self._batches.length),
            "the data's fingerprint": fingerprint(data, seed=seed)[:16],
            "global_batch": str(global_batch),
            "seed": str(seed),
            "the order of samples": self._batches.sampling.order,
            "the optimizers": ", ".join(type(one).__name__ for one in optimizers),
            "the strategy": f"{strategy}, {consistency}",
            "batch_norm": batch_norm,
            "the tables": str([msgspec.to_builtins(spec) for spec in self._strategy.sparse.specs]),
        }
        self._consistency = options.mode
        if self._consistency.is_leased and self._strategy.has_batch_statistics():
            raise ValueError(
                f"consistency={consistency!r} with batch normalisation: each worker would have running statistics of "
                "its own; use consistency='sync', or a normalisation without them (GroupNorm, LayerNorm)"
            )
        self._schedules = Schedules(others)
        self._leasing: LeaseLoop | None = None
        self._taken: Taken | None = None
        self._identity = Identity()
        own = joining.folder_of(self._ticket)
        folder = Path(checkpoints.folder) if checkpoints.folder is not None else own
        depot = joining.depot_of(self._ticket, self._identity)
        resumes = checkpoints.resume or (self._ticket is not None and self._ticket.resumed)
        whose = joining.training_of(self._ticket)
        claim = FolderClaim(folder, whose, resumes=resumes) if folder is not None and folder != own else None
        self._saver = Saver(checkpoints, folder, self._tell, own=own, depot=depot, claim=claim)
        training = TrainingState(
            model, optimizers, others, self._strategy.aggregation, only_trained=checkpoints.only_trained
        )
        self._ledger = TrainingLedger(
            *(training, self._saver, self._batches.length, self._tell),
            sampling=self._batches.sampling,
            leased=self._consistency.is_leased and self._ticket is not None,
            resumes=checkpoints.resume or self._ticket is not None,
        )
        self._joined: joining.Joined | None = None
        self._untold: list[tuple[str, str]] = []  # lines of the log from before that
        self._servers: GroupClient | None = None
        self._endings = Endings(self)
        self.halting = Halting(self._ticket)
        self._saver.is_orphaned, self._saver.is_quiet = self.halting.is_due, self.halting.is_quiet
        self._validation = ValidationData(seed, loader, self._tell_death)
        self._headers = Headers(self._join)
        self._stepping = StepLoop(
            *(self._join, self._headers, self._ledger, self._batches, self._strategy, self._sharing),
            *(nonfinite, self._tell),
        )
        self._evaluator = Evaluator(
            *(self._join, self._headers, self._ledger, model, self._validation, self._sharing, self._check)
        )
        self._first_epoch = 0
        self._max_steps: int | None = None  # of the present loop over epochs
        self._closed = False
        joining.occupy(self._ticket)

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The script's own values, which reach newcomers and checkpoints. Change them in the loop body."""
        return self._ledger.training.user

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves: rank 0, whoever that is at present."""
        return self.rank == 0

    @property
    def operation(self) -> int:
        """The number of the last operation that was tried: a step, an evaluation or a decision."""
        return self._joined.membership.operation if self._joined is not None else 0

    @property
    def rank(self) -> int:
        """This worker's place among the workers, from 0; it may change when workers come and go."""
        return self._present_plan().rank_of(self._join().member)

    @property
    def world_size(self) -> int:
        """How many workers there are at present."""
        return len(self._present_plan().seats)

    def _present_plan(self) -> Plan:
        """While the next one is being made, the last one."""
        self._seat()
        joined = self._join()
        plan = joined.client.look(lambda machine: machine.plan) or joined.membership.last_plan
        return plan or joined.membership.wait_for_plan()

    @property
    def steps(self) -> int:
        """How many steps the run has done."""
        return self._ledger.book.steps

    @property
    def skipped(self) -> int:
        """How many steps did not count because a gradient was not finite."""
        return self._ledger.book.skipped

    @property
    def lr_factor(self) -> float:
        """What this worker's learning rates are multiplied with where workers do not wait for each other. Less than 1
        suits a worker whose gradients are old."""
        return self._leasing.lr_factor if self._leasing is not None else 1.0

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"lr_factor={factor}: give a number, 0 or more")
        self._join()
        if self._leasing is not None:
            self._leasing.lr_factor = float(factor)
        elif factor != 1.0:
            logger.warning("lr_factor has no effect where all workers step together")

    @property
    def num_steps_per_epoch(self) -> int:
        """How many global batches an epoch has; the last one may be smaller."""
        return self._batches.num_steps

    # -- tables -----------------------------------------------------------------------------------------------------

    @boundary
    def prefetch(self, ids_of: Callable[[Any], Mapping[Table, torch.Tensor]], *, ahead: bool = True) -> None:
        """Get rows of tables before `loss_fn` asks for them. `ids_of(batch)` says which ids each table will be asked
        for. Those of the next batch are pulled from servers while this one is computed (if `ahead`), which
        changes nothing in what is learned. What `ids_of` leaves out is pulled when it is asked for."""
        self._strategy.sparse.prefetch(ids_of, ahead=ahead)

    @boundary
    def table(self, module: Table) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a table: their ids, in order, and the rows themselves, as plain tensors."""
        names = {id(one): name for name, one in self._strategy.sparse.modules.items()}
        if id(module) not in names:
            raise ValueError(f"{module} is no table of this session's model")
        self._seat()
        return self._strategy.aggregation.table(names[id(module)])

    # -- the loop ----------------------------------------------------------------------------------------------------

    @boundary_of_loop
    def epochs(self, count: int, *, max_steps: int | None = None) -> Iterator[Epoch]:
        """The epochs that are still to be done of these `count`; further calls go on from there. They end early, also
        within an epoch, when the run has done `max_steps` steps in all. An epoch has a `number`, from 0, and as its
        length the number of its steps."""
        if type(count) is not int or count < 0:
            raise ValueError(f"epochs({count!r}): give the number of epochs, 0 or more")
        if max_steps is not None and (type(max_steps) is not int or max_steps < 0):
            raise ValueError(f"epochs(max_steps={max_steps!r}): give a number of steps, 0 or more, or None")
        self._check_open()
        self._seat()
        first, self._first_epoch = self._first_epoch, self._first_epoch + count
        self._stepping.num_epochs = self._first_epoch
        if self._leasing is not None:
            self._leasing.num_epochs = self._first_epoch
        self._max_steps = max_steps
        if self._ledger.book.is_stopped and first <= self._ledger.book.cursor.epoch < first + count:
            return  # whoever starts later leaves this loop where the others did
        while True:
            book = self._ledger.book
            if book.cursor.epoch < first:
                book.begin_epoch(first)
            elif is_finished(book.cursor, self._batches.length):
                book.begin_epoch(book.cursor.epoch + 1)
            if book.cursor.epoch >= first + count or self._is_enough():
                return
            self._ledger.in_loop, book.is_stopped = True, False
            try:
                yield Epoch(self, book.cursor.epoch)
            except GeneratorExit:
                self._endings.loop_left()
                raise
            finally:
                self._ledger.in_loop = False
            cursor = self._ledger.book.cursor
            if not is_finished(cursor, self._batches.length) and not self._is_enough():
                raise RuntimeError(
                    f"epoch {cursor.epoch} was left at sample {cursor.position} of {self._batches.length}; leave the "
                    "loop over epochs too, or go through all of its batches"
                )

    def _is_enough(self) -> bool:
        """Whether the loop over epochs ends here because of the number of its steps. Where leases are done, the cursor
        says which of them all workers have."""
        book = self._ledger.book
        done = book.steps
        if self._leasing is not None:
            done = book.steps_before + num_steps(book.cursor.position, self._batches.global_batch)
        return self._max_steps is not None and done >= self._max_steps

    def _fetch(self) -> Any:
        """This worker's part of the next global batch."""
        with self._going():
            return self._stepping.fetch()

    def _fetch_lease(self) -> bool:
        """Take the next lease; False at the end of the epoch."""
        assert self._leasing is not None
        with self._going():
            taken = self._leasing.fetch()
        if taken is LeaseEnd.STOPPED:
            self._operate(OperationKind.END, self._attempt_end)
        if taken is LeaseEnd.FINISHED:
            self._operate(OperationKind.REFRESH, self._attempt_refresh)
        self._taken = taken if isinstance(taken, Taken) else None
        return self._taken is not None

    def _attempt_refresh(self, place: Place) -> Attempt:
        """An epoch of leases ends: all workers get the same model, before any of them begins the next epoch."""
        leasing = self._leasing
        assert leasing is not None
        leasing.refresh()
        rows = self._headers.exchange(place)

        def commit() -> None:
            leasing.end_epoch()
            self._ledger.settle(place.operation)
            self._ledger.keep_result(place.operation, None, self._headers.stopping_agreed)

        return self._headers.outcome(place, rows, commit)

    @boundary
    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        """Make one update of the model from the global batch of which `batch` is this worker's part. Returns the mean
        loss over the global batch."""
        if self._taken is not None and batch is self._taken.batch.value:
            taken, self._taken = self._taken, None
            assert self._leasing is not None
            with self._going():
                return self._leasing.step(loss_fn, taken)
        given = self._stepping.take(batch)
        began = time.monotonic()
        loss: float = self._operate(
            OperationKind.STEP,
            lambda place: self._stepping.attempt(place, loss_fn, given, began),
            self._stepping.prepare,
        )
        return loss

    # -- validation and decisions ------------------------------------------------------------------------------------

    @boundary
    def evaluate(self, validate: Validate, data: Any, *, batch: int | None = None) -> dict[str, Any]:
        """Call `validate` on all of `data`, spread over all workers. Each sample counts once, and all workers get the
        same results."""
        if (recorded := self._recorded()) is not None:
            return dict(recorded)
        size = batch or self._batches.global_batch
        result: dict[str, Any] = self._operate(
            OperationKind.EVALUATE, lambda place: self._attempt_evaluate(place, validate, data, size)
        )
        return result

    def _attempt_evaluate(self, place: Place, validate: Validate, data: Any, size: int) -> Attempt:
        if self._leasing is not None:  # all leases are done: all workers see the same model
            self._leasing.refresh()
        return self._evaluator.attempt_evaluate(place, validate, data, size)

    @boundary
    def score(self, value: float, *, mode: Mode = "min", min_delta: float = 0.0) -> bool:
        """Score the model as it is. If this is the best score so far, a checkpoint keeps the model. Returns whether it
        is; the same answer on all workers."""
        return self._decide(value, mode, min_delta)

    @boundary
    def should_stop(self, score: float, *, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> bool:
        """Score the model as `score` does. Returns whether more than `patience` scores in a row were not the best; the
        same answer on all workers."""
        if patience < 0:
            raise ValueError(f"patience={patience}: give 0 or more")
        return self._decide(score, mode, min_delta, patience)

    def _decide(self, score: float, mode: Mode, min_delta: float, patience: int | None = None) -> bool:
        if mode not in ("min", "max"):
            raise ValueError(f"mode={mode!r}: give 'min' if less is better, 'max' if more is")
        if (recorded := self._recorded()) is not None:
            return bool(recorded)
        value = float(score)
        answer: bool = self._operate(
            OperationKind.DECIDE, lambda place: self._evaluator.attempt_decide(place, value, mode, min_delta, patience)
        )
        return answer

    def _recorded(self) -> Any:
        self._seat()
        return self._ledger.recorded()

    # -- operations in general ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed; a training that goes on needs a new one")

    def _operate(
        self, kind: OperationKind, attempt: Callable[[Place], Attempt], prepare: Callable[[Plan], None] | None = None
    ) -> Any:
        self._check_open()
        self._seat()
        joined = self._join()
        if self._leasing is not None and self._leasing.is_open and kind is not OperationKind.END:
            raise RuntimeError(
                f"{kind.value} in the middle of an epoch, where each worker is somewhere else; with "
                "consistency='async' or 'bounded:K' call it between epochs, when all leases are done"
            )

        def either(place: Place) -> Attempt:
            # The run was asked to stop: at a clean point all workers end it instead of going on.
            return attempt(place) if place.kind is kind else self._attempt_end(place)

        if kind is not OperationKind.STEP:
            self._sharing.watch.pause()
        with self._going(), self._endings.watching_for_exit():
            outcome = joined.membership.operate(kind, either, prepare)
        if outcome == END:
            self._leave_after_end()
            raise SystemExit(HALTED if self.halting.has_halted else self._endings.exit_code)
        self._sharing.watch.resume()
        return outcome

    @contextlib.contextmanager
    def _going(self) -> Iterator[None]:
        """Who is told to go, or is left alone, ends here: the script has no part in it."""
        try:
            yield
        except Released as released:
            self._go(released)
        except Evicted as evicted:
            self._give_way(evicted)
        except Orphaned as orphaned:
            self._halt(orphaned)

    def _go(self, released: Released) -> NoReturn:
        """The run goes on, or ended, without this worker, in order."""
        logger.info("this worker leaves: %s", released.reason)
        self._finish(10.0)
        raise SystemExit(0) from None

    def _give_way(self, reason: Evicted | Orphaned) -> None:
        """The run goes on, or is over, without this worker, which may come back as another."""
        logger.warning("this worker ends: %s", reason)
        self._finish(1.0)
        raise SystemExit(START_AGAIN) from None

    def _is_loader(self) -> bool:
        """Whether this worker loads what servers lack: the main one, as far as is known."""
        if self._joined is None:
            return False
        plan = self._joined.client.look(lambda machine: machine.plan) or self._joined.membership.last_plan
        return plan is not None and plan.rank_of(self._joined.member) == 0

    def _recall(self, with_optimizers: bool) -> int:
        """A server was lost and nobody else had its ranges: what the newest checkpoint has of them; the number of its
        last update."""
        if (newest := self._saver.newest()) is None:
            return 0
        tree = saving.tree_of(newest)
        if with_optimizers:
            self._ledger.training.load_optimizers(tree["update"]["optimizers"])
        self._strategy.aggregation.load(tree["update"])
        return int(tree["book"]["steps"])

    def _halt(self, orphaned: Orphaned) -> NoReturn:
        self._leave_behind(orphaned)
        raise SystemExit(HALTED) from None

    def _leave_behind(self, orphaned: Orphaned) -> None:
        """The coordinator is gone for good: this worker ends, and what it holds stays on its host."""
        aggregation, num_leases = self._strategy.aggregation, 0
        served = aggregation if isinstance(aggregation, ServerAggregation) else None
        making = served.be_orphaned() if served is not None else 0
        if self._leasing is not None:
            served, num_leases = None, self._leasing.num_done()  # each range says which leases it has

        def step_on_servers() -> int:
            return served.gathered_step if served is not None else 0

        def leave_behind() -> Path | None:
            complete = functools.partial(self._stepping.complete, making) if making else None
            return self._ledger.leave_behind(num_leases, step_on_servers, complete)

        self.halting.halt(orphaned, leave_behind)
        self._finish(0.1)

    def _check(self) -> None:
        self.halting.check()
        if self._joined is not None:
            self._joined.membership.check()

    def _check_wait(self) -> None:
        self.halting.check()
        self.halting.check_wait(self._servers.waited_s if self._servers is not None else 0.0)
        if self._joined is not None:
            self._joined.membership.check_wait()

    # -- beginning and end -------------------------------------------------------------------------------------------

    def _join(self) -> joining.Joined:
        """Become a member of the run: at the first call that needs it."""
        if self._joined is None:
            import torch._dynamo  # noqa: F401  # the first optimizer step would, for seconds, while others wait

            try:
                base = self._ledger.look_for_start()
            except Unreached as error:
                self._halt(Orphaned(f"this worker cannot learn which checkpoints there are: {error}"))
            joined = joining.join(self._ticket, self._identity, max(base, 0), self._ledger, self.halting.begin)
            self._joined = joined
            while self._untold:
                joined.client.progress.log(*self._untold.pop(0))
            self.halting.connect(joined)
            self._ledger.connect(
                joined.run, joined.client.progress, lambda: joined.client.look(lambda machine: machine.applied)
            )
            parameters = [one for one in self._model.parameters() if one.requires_grad]
            joined.groups.reserve_bytes = sum(one.numel() * one.dtype.itemsize for one in parameters)
            self._endings.watch(is_alone=self._ticket is None, has_checkpoints=self._saver.is_on)
            capacity = self._ticket.capacity if self._ticket is not None else 0.0
            aggregation = self._strategy.aggregation
            ranges: tuple[int, ...] = ()
            if isinstance(aggregation, ServerAggregation) and joined.endpoint is not None:
                self._servers = GroupClient(joined.endpoint, check=self._check_wait)
                aggregation.connect(self._servers)
                joined.membership.on_placement = self._servers.adopt
                ranges = aggregation.layout.weights
                if self._consistency.is_leased:
                    self._leasing = self._make_leasing(joined, aggregation)
            introduction = joining.introduce(
                joined, self._facts, self._model, capacity, ranges, leased=self._leasing is not None
            )
            if self._ticket is not None:
                joined.membership.expect_state(self._ledger.training.expected_bytes())
            joined.client.post(MemberReady(introduction, base))
        return self._joined

    def _make_leasing(self, joined: joining.Joined, served: ServerAggregation) -> LeaseLoop:
        assert isinstance(joined.client, MemberClient)
        leases = LeaseQueue(joined.member, joined.client.speak)
        joined.client.leases = leases
        return LeaseLoop(
            joined,
            leases,
            self._ledger,
            self._batches,
            self._strategy,
            served,
            self._consistency,
            self._schedules,
            self._options.nonfinite,
            self._tell,
        )

    def _seat(self) -> None:
        """Wait until this worker has the state of the run."""
        joined = self._join()
        if joined.client.look(lambda machine: machine.phase) is Phase.READY or not self._ledger.has_worked:
            try:
                joined.membership.wait_for_state()
            except Released as released:
                self._go(released)
            except Orphaned as orphaned:
                # On the coordinator's own host an agent brings it back, and this worker with it.
                if self.halting.is_guest:
                    self._halt(orphaned)
                self._give_way(orphaned)
            except Evicted as evicted:
                self._give_way(evicted)

    @boundary
    def close(self) -> None:
        """End the training. Returns when all workers have come to the end. A script that ends without it calls it."""
        if self._closed:
            return
        if self._joined is not None and not self._endings.has_failed:
            self._ledger.book.is_stopped = False  # to resume a run that came to its end is to go on
            try:
                outcome = self._joined.membership.operate(OperationKind.END, self._attempt_end)
                if outcome == END:
                    self._leave_after_end()
            except Released as released:
                logger.info("this worker leaves: %s", released.reason)
            except Orphaned as orphaned:
                self._leave_behind(orphaned)
        if not self._closed:
            self._finish(10.0)

    def _attempt_end(self, place: Place) -> Attempt:
        if self._leasing is None:
            self._ledger.save_at_end(place)
        else:
            self._leasing.save_at_end(place)
        rows = self._headers.exchange(place)

        def commit() -> Any:
            self._ledger.settle(place.operation)
            self._ledger.keep_result(place.operation, END, self._headers.stopping_agreed)
            return END

        outcome = self._headers.outcome(place, rows, commit)
        self._ledger.publish_at_end(place)
        return outcome

    def _leave_after_end(self) -> None:
        self._saver.close()
        if unsaved := self._saver.unsaved():
            logger.error("%s", unsaved)
            self._tell(losses.NOT_SAVED, unsaved)
        assert self._joined is not None
        try:
            self._joined.membership.wait_for_release()
        except Orphaned as orphaned:
            self._leave_behind(orphaned)
        else:
            self._finish(10.0)

    def fail(self, cause: str) -> None:
        """The script raised: say why, and go."""
        if self._joined is not None and not self._closed:
            self._joined.client.post(Fail(cause))
            self._finish(5.0)

    def leave(self) -> None:
        """Ask to leave after the step under way; alone, to stop."""
        if self._joined is not None:
            self._joined.client.post(Leave())
            self.halting.hurry()

    def give_up_saving(self) -> bool:
        """End without the last checkpoint, if that is all that the end waits for; whether it is."""
        return self._saver.give_up()

    def _finish(self, flush_s: float) -> None:
        self._closed = True
        self.halting.close()
        self._endings.close()
        self._saver.close()
        self._batches.close()
        self._validation.close()
        self._strategy.close()
        if self._servers is not None:
            self._servers.close()
        if self._joined is not None:
            self._joined.close(flush_s)

    def _tell(self, kind: str, text: str) -> None:
        """For the run's log."""
        logger.info("%s: %s", kind, text)
        if kind not in RUN_LOG:
            return
        if self._joined is None:
            self._untold.append(RUN_LOG[kind](text))
        else:
            self._joined.client.progress.log(*RUN_LOG[kind](text))

    def _tell_death(self, text: str) -> None:
        self._tell("loader", text)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._endings.failed(error)


class Epoch:
    """One pass over the data: an iterable of this worker's parts of the global batches that are still to be done."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number = number

    def __len__(self) -> int:
        """The number of steps of the whole epoch."""
        return self._session.num_steps_per_epoch

    @boundary_of_loop
    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._batches()
        except GeneratorExit:
            self._session._endings.loop_left()
            raise

    def _batches(self) -> Iterator[Any]:
        session = self._session
        if session._leasing is not None:
            session._leasing.begin(self.number, session._max_steps)
            while session._fetch_lease():
                assert session._taken is not None
                yield session._taken.batch.value
                if session._taken is not None:
                    raise RuntimeError("a batch was taken, but session.step was not called for it")
            return
        while not is_finished(session._ledger.book.cursor, session._batches.length) and not session._is_enough():
            before = session._ledger.book.cursor
            yield session._fetch()
            if session._ledger.book.cursor == before:
                raise RuntimeError("a batch was taken, but session.step was not called for it")

    def __repr__(self) -> str:
        return f"Epoch({self.number})"


def _told_apart(stateful: Sequence[Stateful]) -> tuple[list[torch.optim.Optimizer], list[Stateful]]:
    """The optimizers, and what else has a state."""
    optimizers = [one for one in stateful if isinstance(one, torch.optim.Optimizer)]
    others = [one for one in stateful if not isinstance(one, torch.optim.Optimizer)]
    for one in others:
        if not isinstance(one, Stateful):
            raise TypeError(f"{type(one).__name__} has no state_dict and load_state_dict; give optimizers, schedules")
    if not optimizers:
        raise TypeError("a session needs an optimizer: Session(model, optimizer, ...)")
    return optimizers, others
