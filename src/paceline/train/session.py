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

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from paceline.data.cursor import is_finished
from paceline.data.loader import LoaderOptions
from paceline.data.order import Order
from paceline.nn.embedding import Table
from paceline.strategy.batch_norm import BatchNormName
from paceline.strategy.options import NonFinite, SessionOptions, StrategyName
from paceline.train import joining
from paceline.train.book import Mode
from paceline.train.epoch import Epoch
from paceline.train.evaluation import Validate
from paceline.train.evaluator import Decision, Evaluation
from paceline.train.frames import boundary, boundary_of_loop
from paceline.train.loops.base import Loop
from paceline.train.loops.leases import LeaseLoop
from paceline.train.loops.steps import StepLoop
from paceline.train.parts import assemble
from paceline.train.recording import begin_recording
from paceline.train.run import Run
from paceline.train.saving import Checkpoints
from paceline.train.training_state import Stateful
from paceline.watch import spans


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
        if spans.is_wanted():
            checkpoints = Checkpoints()  # what is only measured neither resumes nor leaves anything
        self._run = run = Run(joining.find_ticket())
        self._parts = parts = assemble(run, model, stateful, data, global_batch, options, checkpoints)
        is_leased = options.mode.is_leased and not run.is_alone
        self._loop: Loop = LeaseLoop(run, parts) if is_leased else StepLoop(run, parts)
        run.equip(parts, self._loop)
        begin_recording(parts)
        self._first_epoch = 0
        joining.occupy(run.ticket)

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The script's own values, which reach newcomers and checkpoints. Change them in the loop body."""
        return self._parts.ledger.training.user

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves: rank 0, whoever that is at present."""
        return self.rank == 0

    @property
    def operation(self) -> int:
        """The number of the last operation that was tried: a step, an evaluation or a decision."""
        return self._run.operation

    @property
    def rank(self) -> int:
        """This worker's place among the workers, from 0; it may change when workers come and go."""
        return self._run.present_plan().rank_of(self._run.joined.member)

    @property
    def world_size(self) -> int:
        """How many workers there are at present."""
        return len(self._run.present_plan().seats)

    @property
    def steps(self) -> int:
        """How many steps the run has done."""
        return self._parts.ledger.book.steps

    @property
    def skipped(self) -> int:
        """How many steps did not count because a gradient was not finite."""
        return self._parts.ledger.book.skipped

    @property
    def lr_factor(self) -> float:
        """What this worker's learning rates are multiplied with where workers do not wait for each other. Less than 1
        suits a worker whose gradients are old."""
        return self._loop.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float) -> None:
        if not (math.isfinite(factor) and factor >= 0):
            raise ValueError(f"lr_factor={factor}: give a number, 0 or more")
        self._loop.lr_factor = float(factor)

    @property
    def num_steps_per_epoch(self) -> int:
        """How many global batches an epoch has; the last one may be smaller."""
        return self._parts.batches.num_steps

    # -- tables -----------------------------------------------------------------------------------------------------

    @boundary
    def prefetch(self, ids_of: Callable[[Any], Mapping[Table, torch.Tensor]], *, ahead: bool = True) -> None:
        """Get rows of tables before `loss_fn` asks for them. `ids_of(batch)` says which ids each table will be asked
        for. Those of the next batch are pulled from servers while this one is computed (if `ahead`), which
        changes nothing in what is learned. What `ids_of` leaves out is pulled when it is asked for."""
        self._parts.updater.gradients.sparse.prefetch(ids_of, ahead=ahead)

    @boundary
    def table(self, module: Table) -> tuple[torch.Tensor, torch.Tensor]:
        """All rows of a table: their ids, in order, and the rows themselves, as plain tensors."""
        updater = self._parts.updater
        names = {id(one): name for name, one in updater.gradients.sparse.modules.items()}
        if id(module) not in names:
            raise ValueError(f"{module} is no table of this session's model")
        self._run.seat()
        return updater.strategy.state.table(names[id(module)])

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
        self._run.check_open()
        self._run.seat()
        first, self._first_epoch = self._first_epoch, self._first_epoch + count
        loop, ledger, length = self._loop, self._parts.ledger, self._parts.batches.length
        loop.num_epochs, loop.max_steps = self._first_epoch, max_steps
        if ledger.book.is_stopped and first <= ledger.book.cursor.epoch < first + count:
            return  # whoever starts later leaves this loop where the others did
        while True:
            book = ledger.book
            if book.cursor.epoch < first:
                book.begin_epoch(first)
            elif is_finished(book.cursor, length):
                book.begin_epoch(book.cursor.epoch + 1)
            if book.cursor.epoch >= first + count or _is_enough(loop):
                return
            ledger.in_loop, book.is_stopped = True, False
            try:
                yield Epoch(self._run, loop, book.cursor.epoch, self.num_steps_per_epoch)
            except GeneratorExit:
                self._run.endings.loop_left()
                raise
            finally:
                ledger.in_loop = False
            cursor = ledger.book.cursor
            if not is_finished(cursor, length) and not _is_enough(loop):
                raise RuntimeError(
                    f"epoch {cursor.epoch} was left at sample {cursor.position} of {length}; leave the loop over "
                    "epochs too, or go through all of its batches"
                )

    @boundary
    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        """Make one update of the model from the global batch of which `batch` is this worker's part. Returns the mean
        loss over the global batch."""
        before = spans.mark("session")
        loss = self._loop.step(loss_fn, batch)
        spans.mark(before)
        return loss

    # -- validation and decisions ------------------------------------------------------------------------------------

    @boundary
    def evaluate(self, validate: Validate, data: Any, *, batch: int | None = None) -> dict[str, Any]:
        """Call `validate` on all of `data`, spread over all workers. Each sample counts once, and all workers get the
        same results."""
        if (recorded := self._recorded()) is not None:
            return dict(recorded)
        size = batch or self._parts.batches.global_batch
        result: dict[str, Any] = self._run.operate(Evaluation(self._run, self._parts, self._loop, validate, data, size))
        return result

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
        answer: bool = self._run.operate(Decision(self._run, self._parts, float(score), mode, min_delta, patience))
        return answer

    def _recorded(self) -> Any:
        """The result of a worker that was here before this one joined."""
        self._run.seat()
        return self._parts.ledger.recorded()

    # -- the end -----------------------------------------------------------------------------------------------------

    @boundary
    def close(self) -> None:
        """End the training. Returns when all workers have come to the end. A script that ends without it calls it."""
        self._run.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._run.endings.failed(error)


def _is_enough(loop: Loop) -> bool:
    return loop.max_steps is not None and loop.num_steps_done() >= loop.max_steps
