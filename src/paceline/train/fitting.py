"""Training without a loop: `fit(task)` is the loop that one would write with a `Session`, and nothing more.

Contract
- `fit` returns on every worker that is there at the end, with the same `Fitted`, and the same weights in the model. A
  worker that leaves, or a run that is asked to stop, ends in `SystemExit(0)` as it does with a session.
- Validation is exact over all workers, and all of them decide alike to go on or to stop.
- What `fit` keeps (history, best score, best weights) lies in `session.state` under one name. It is changed in the
  loop body only, between two operations, by the same rule from the same scores: so it is the same on all workers,
  reaches newcomers with the rest of the state, and is in every checkpoint.

The best weights are a part of that state: a copy in memory on every worker, made when a validation is the best so far.
There are cheaper places, but each fails somebody. A copy in memory outside of the state is missing on who joined later
and on everybody after a resume. The checkpoint of the best model is a file on the main worker's host, which others may
not see, and there is none without a folder. A broadcast at the end needs one worker that has it, and after a resume
there is none. The price is the size of the weights once more in each worker's memory, in a newcomer's transfer and in a
checkpoint: a third more with Adam. `Best(restore=False)` does without.

They are put into the model when the session is closed, so that the last checkpoint holds the last weights, from which
a training with more epochs goes on. A training that is resumed after its end returns at once with what it had.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint.weights import load_weights, weights_of
from paceline.strategy.loss_calls import spread
from paceline.train.book import Book
from paceline.train.callbacks import EpochInfo, RunInfo, StepInfo, Teller, ValidationInfo
from paceline.train.epoch import Epoch
from paceline.train.evaluation import Total, Validate
from paceline.train.frames import boundary
from paceline.train.rates import Rates
from paceline.train.session import Session
from paceline.train.task import EarlyStopping, Task, Validation
from paceline.train.training_state import frozen_weights
from paceline.train.warming import warm_up

Reason = Literal["finished", "early stopping"]

_NAME = "paceline.fit"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What a training came to; the same on all workers.

    >>> fitted = paceline.fit(task)
    >>> print(fitted.reason, fitted.steps, [epoch.loss for epoch in fitted.history])

    `history` has every whole epoch, `validations` every validation. `best` is the validation whose weights are in the
    model, unless the task does not restore them."""

    reason: Reason
    steps: int
    skipped: int
    history: tuple[EpochInfo, ...]
    validations: tuple[ValidationInfo, ...]
    best: ValidationInfo | None

    @property
    def scores(self) -> Mapping[str, float]:
        """Those of the last validation; empty without any."""
        return self.validations[-1].scores if self.validations else {}


@boundary
def fit(task: Task) -> Fitted:
    """Train as the task says. Returns when all workers have come to the end.

    >>> task = paceline.Task(
    ...     model=model, optimizer=optimizer, loss_fn=loss_fn, data=data, global_batch=256, epochs=2
    ... )
    >>> fitted = paceline.fit(task)
    """
    options = task.options
    if task.warm_up:
        warm_up(task.model, task.loss_fn, task.data, options.loader, samples=task.warm_up)
    schedules = _make_schedules(task)
    session = Session(
        task.model,
        *task.optimizers,
        *schedules,
        data=task.data,
        global_batch=task.global_batch,
        checkpoints=task.checkpoints,
        **vars(options),
    )
    training = _Training(task, session, schedules)
    try:
        with session:
            reason = training.run()
            session.close()
    except SystemExit:
        training.teller.stop("left")
        raise
    except BaseException as error:
        training.teller.fail(error)
        raise
    training.restore_best()
    training.teller.stop(reason)
    return training.fitted(reason)


def _make_schedules(task: Task) -> tuple[LRScheduler, ...]:
    rates = task.schedule
    if not isinstance(rates, Rates):
        return task.given_schedules
    return tuple(
        rates.build(optimizer, global_batch=task.global_batch, num_steps=task.num_steps)
        for optimizer in task.optimizers
    )


class _Training:
    """The loop, and what it notes."""

    def __init__(self, task: Task, session: Session, schedules: tuple[LRScheduler, ...]) -> None:
        self._task = task
        self._session = session
        self._schedules = schedules
        self._length = len(task.data)
        self.teller = Teller(task.callbacks, lambda: session.is_main, self._run_info)
        if task.validation is not None:
            self._validate = task.validation.validate or _loss_score(task.loss_fn)

    @property
    def _notes(self) -> dict[str, Any]:
        """Looked up each time: a newcomer's state is replaced as a whole."""
        notes: dict[str, Any] = self._session.state.setdefault(_NAME, _new_notes())
        return notes

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Reason:
        for epoch in self._session.epochs(self._task.epochs):
            self.teller.start()
            if self._has_lost_patience():  # it had ended, and was resumed
                return "early stopping"
            for batch in epoch:
                self._step(batch, epoch)
                if self._is_due_in_epoch() and self._is_over_after_validation(epoch):
                    return "early stopping"
            of = self.teller.operation
            is_validated = self._is_due_at_end(epoch)
            is_over = is_validated and self._is_over_after_validation(epoch)
            self._note_epoch(epoch, is_validated, of)
            if is_over:
                return "early stopping"
        self.teller.start()
        return "early stopping" if self._has_lost_patience() else "finished"

    def _step(self, batch: Any, epoch: Epoch) -> None:
        session, began = self._session, time.monotonic()
        num_skipped = session.skipped
        rates = self._rates() if self.teller.has_listeners else ()
        loss = session.step(self._task.loss_fn, batch)
        self.teller.completed()
        for schedule in self._schedules:
            schedule.step()
        notes = self._notes
        samples = min(self._task.global_batch, self._length - notes["position"])
        is_skipped = session.skipped > num_skipped
        notes["position"] += samples
        if not is_skipped:
            notes["loss_sum"] += loss * samples
            notes["loss_samples"] += samples
        if self.teller.has_listeners:
            info = StepInfo(
                step=session.steps,
                epoch=epoch.number,
                loss=loss,
                samples=samples,
                rates=rates,
                workers=session.world_size,
                seconds=time.monotonic() - began,
                skipped=is_skipped,
            )
            self.teller.tell("on_step", info, of=self.teller.operation)

    def _rates(self) -> tuple[float, ...]:
        return tuple(float(group["lr"]) for optimizer in self._task.optimizers for group in optimizer.param_groups)

    def _note_epoch(self, epoch: Epoch, is_validated: bool, of: int) -> None:
        notes = self._notes
        num_samples = notes["loss_samples"]
        info = EpochInfo(
            epoch=epoch.number,
            step=self._session.steps,
            loss=notes["loss_sum"] / num_samples if num_samples else float("nan"),
            scores=notes["validations"][-1]["scores"] if is_validated else {},
        )
        notes["history"].append(dataclasses.asdict(info))
        notes.update(position=0, loss_sum=0.0, loss_samples=0)
        self.teller.tell("on_epoch_end", info, of=of)

    # -- validation --------------------------------------------------------------------------------------------------

    def _is_due_in_epoch(self) -> bool:
        """By steps, but for the last step of an epoch, where it is the epoch's end that counts."""
        return self._is_due_by_steps() and self._notes["position"] < self._length

    def _is_due_by_steps(self) -> bool:
        validation = self._task.validation
        if validation is None or validation.every_steps is None:
            return False
        return self._session.steps % validation.every_steps == 0

    def _is_due_at_end(self, epoch: Epoch) -> bool:
        validation, number = self._task.validation, epoch.number + 1
        if validation is None:
            return False
        by_epochs = validation.every_epochs is not None and number % validation.every_epochs == 0
        return by_epochs or number == self._task.epochs or self._is_due_by_steps()

    def _is_over_after_validation(self, epoch: Epoch) -> bool:
        validation, session = self._task.validation, self._session
        assert validation is not None
        results = _finished(session.evaluate(self._validate, validation.data, batch=validation.batch))
        self.teller.completed()
        of = self.teller.operation
        scores = {name: value for name, value in results.items() if isinstance(value, float)}
        score = _score(scores, validation)
        is_best = self._judge(score, validation)
        info = ValidationInfo(epoch=epoch.number, step=session.steps, scores=scores, is_best=is_best)
        self._notes["validations"].append(dataclasses.asdict(info))
        best, is_over = validation.best, False
        if isinstance(best, EarlyStopping):
            is_over = session.should_stop(score, patience=best.patience, mode=best.mode, min_delta=best.min_delta)
        else:
            session.score(score, mode=best.mode, min_delta=best.min_delta)
        self.teller.completed()
        self.teller.tell("on_validation", results, info, of=of)
        return is_over

    def _judge(self, score: float, validation: Validation) -> bool:
        """By the session's own rule. The score has the same bits on all workers, and so has the answer."""
        notes = self._notes
        book = Book(best=notes["best"], num_worse=notes["num_worse"])
        is_best = book.judge(score, validation.best.mode, validation.best.min_delta)
        notes.update(best=book.best, num_worse=book.num_worse)
        if is_best and validation.best.restore:
            notes["weights"] = _copy_of(self._task)
        return is_best

    def _has_lost_patience(self) -> bool:
        best = self._task.validation.best if self._task.validation is not None else None
        return isinstance(best, EarlyStopping) and bool(self._notes["num_worse"] > best.patience)

    # -- the end -----------------------------------------------------------------------------------------------------

    def restore_best(self) -> None:
        weights = self._notes["weights"]
        if weights and self._task.validation is not None and self._task.validation.best.restore:
            load_weights(self._task.model, weights, weights_of(self._task.model).keys() - weights.keys())

    def fitted(self, reason: Reason) -> Fitted:
        notes = self._notes
        validations = tuple(ValidationInfo(**one) for one in notes["validations"])
        return Fitted(
            reason=reason,
            steps=self._session.steps,
            skipped=self._session.skipped,
            history=tuple(EpochInfo(**one) for one in notes["history"]),
            validations=validations,
            best=next((one for one in reversed(validations) if one.is_best), None),
        )

    def _run_info(self) -> RunInfo:
        session = self._session
        return RunInfo(
            epochs=self._task.epochs,
            steps_per_epoch=session.num_steps_per_epoch,
            global_batch=self._task.global_batch,
            samples=self._length,
            step=session.steps,
            workers=session.world_size,
        )


def _new_notes() -> dict[str, Any]:
    return {
        "history": [],
        "validations": [],
        "best": None,
        "num_worse": 0,
        "weights": {},
        "position": 0,
        "loss_sum": 0.0,
        "loss_samples": 0,
    }


def _copy_of(task: Task) -> dict[str, Any]:
    """The weights and buffers that checkpoints have, in new memory on the CPU; tied ones stay tied."""
    left_out = set(frozen_weights(task.model, task.optimizers)) if task.checkpoints.only_trained else set()
    weights = {name: _detached(value) for name, value in weights_of(task.model).items() if name not in left_out}
    copied = copy.deepcopy(weights)
    return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in copied.items()}


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _score(scores: Mapping[str, float], validation: Validation) -> float:
    metric = validation.best.metric
    if metric not in scores:
        raise ValueError(
            f"{type(validation.best).__name__}(metric={metric!r}) is not among the scores of validate, which are "
            f"{', '.join(map(repr, scores)) or 'none that are numbers'}; name one of these, or return it"
        )
    return scores[metric]


# -- the loss as a score ---------------------------------------------------------------------------------------------

_SUM, _WEIGHT = "paceline.loss_sum", "paceline.loss_weight"


def _loss_score(loss_fn: Callable[..., Any]) -> Validate:
    """A `validate` from a loss, exact also where that returns the weight of its mean."""

    def validate(*batch: Any) -> dict[str, Any]:
        result = spread(loss_fn, batch)
        if not isinstance(result, tuple):
            return {"loss": result}
        value, weight = float(result[0]), float(result[1])
        return {_SUM: Total(value * weight if weight else 0.0), _WEIGHT: Total(weight)}

    return validate


def _finished(results: dict[str, Any]) -> dict[str, Any]:
    if _SUM not in results:
        return results
    weight = results[_WEIGHT]
    return {"loss": results[_SUM] / weight if weight else float("nan")}
