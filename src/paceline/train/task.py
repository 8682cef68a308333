"""A training as one value: what to train, on what, for how long, and how it is judged.

    task = Task(
        model=model, optimizer=optimizer, loss_fn=loss_fn, data=train_set, global_batch=256, epochs=10,
        schedule=Rates(warm_up=WarmUp(steps=500), schedule="cosine"),
        validation=Validation(data=valid_set, validate=validate, best=EarlyStopping(metric="loss", patience=3)),
        callbacks=[PrintProgress()],
    )
    fitted = paceline.fit(task)

    def loss_fn(x, y):                # the mean over the samples of the batch, or (mean, weight)
        return F.cross_entropy(model(x), y)

    def validate(x, y):               # numbers are means over the batch; or Total(...), Every(...)
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

Both are called as in a session, and have the model from around them. A batch that is a tuple or list is spread over the
arguments; anything else, as a dict, is the one argument: `def loss_fn(batch)`. Both may be called again for the same
step, after a loss of a worker, and in parts.

Everything is checked when it is built: an error names the field, its value, and what to give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from paceline.data.dataset import check_dataset
from paceline.strategy.options import SessionOptions
from paceline.train.callbacks import Callback
from paceline.train.rates import Rates
from paceline.train.saving import Checkpoints


@dataclass(frozen=True, kw_only=True)
class Best:
    """Which validation is the best: the one whose score `metric` is better by more than `min_delta` than the best
    before. With `restore`, `fit` ends with the weights of that moment in the model.

    >>> paceline.Validation(data=valid_set, validate=validate, best=paceline.Best(metric="accuracy", mode="max"))
    """

    metric: str = "loss"
    mode: Literal["min", "max"] = "min"
    min_delta: float = 0.0
    restore: bool = True

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"{name}(metric={self.metric!r}): give the name of one of the scores of validate")
        if self.mode not in ("min", "max"):
            raise ValueError(f"{name}(mode={self.mode!r}): give 'min' if less is better, 'max' if more is")
        if not self.min_delta >= 0:
            raise ValueError(f"{name}(min_delta={self.min_delta!r}): give 0 or more")


@dataclass(frozen=True, kw_only=True)
class EarlyStopping(Best):
    """The training ends when more than `patience` validations in a row were not better than the best before them.

    >>> paceline.Validation(data=valid_set, best=paceline.EarlyStopping(patience=2))
    """

    patience: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.patience) is not int or self.patience < 0:
            raise ValueError(f"EarlyStopping(patience={self.patience!r}): give 0 validations or more")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """When and how the model is validated: after every `every_epochs` epochs, after every `every_steps` steps, and at
    the end of the last epoch.

    >>> paceline.Validation(data=valid_set, validate=validate, every_epochs=None, every_steps=500)

    `validate` gets `batch` samples of `data` at a time, by default as many as a global batch has. Without `validate`,
    the score is the task's loss."""

    data: Any
    validate: Callable[..., Any] | None = None
    every_epochs: int | None = 1
    every_steps: int | None = None
    batch: int | None = None
    best: Best = field(default_factory=Best)

    def __post_init__(self) -> None:
        check_dataset(self.data)
        if self.validate is not None and not callable(self.validate):
            raise TypeError(f"Validation(validate={self.validate!r}): give a function, as def validate(x, y)")
        for name in ("every_epochs", "every_steps", "batch"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Validation({name}={value!r}): give 1 or more, or None")
        if self.every_epochs is None and self.every_steps is None:
            raise ValueError("Validation(every_epochs=None, every_steps=None) would never validate; give one of them")
        if not isinstance(self.best, Best):
            raise TypeError(f"Validation(best={self.best!r}): give Best(...) or EarlyStopping(...)")


@dataclass(frozen=True, kw_only=True)
class Task:
    """What `fit` trains, on what, and for how long.

    >>> paceline.Task(
    ...     model=model,
    ...     optimizer=optimizer,
    ...     loss_fn=loss_fn,
    ...     data=data,
    ...     global_batch=256,
    ...     epochs=2,
    ...     validation=paceline.Validation(data=valid_set, validate=validate),
    ... )

    `optimizer` is one or several. `schedule` is `Rates`, or torch schedulers of these optimizers, which are stepped
    after each step. `global_batch` is the number of samples of a step over all workers. `warm_up` is the number of
    samples with which the loss is tried before this worker reports ready (see `paceline.warm_up`), 0 for none."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    loss_fn: Callable[..., Any]
    data: Any
    global_batch: int
    epochs: int
    schedule: Rates | LRScheduler | Sequence[LRScheduler] | None = None
    validation: Validation | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    callbacks: Sequence[Callback] = ()
    options: SessionOptions = field(default_factory=SessionOptions)
    warm_up: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"Task(model={type(self.model).__name__}): give a torch.nn.Module")
        if not callable(self.loss_fn):
            raise TypeError(f"Task(loss_fn={self.loss_fn!r}): give a function, as def loss_fn(x, y)")
        length = check_dataset(self.data)
        if type(self.global_batch) is not int or not 1 <= self.global_batch <= length:
            raise ValueError(
                f"Task(global_batch={self.global_batch!r}): give from 1 to the {length} samples of the data; it is the "
                "number of samples of one step over all workers"
            )
        if type(self.epochs) is not int or self.epochs < 1:
            raise ValueError(f"Task(epochs={self.epochs!r}): give 1 epoch or more")
        if type(self.warm_up) is not int or self.warm_up < 0:
            raise ValueError(f"Task(warm_up={self.warm_up!r}): give a number of samples, or 0 for no warm-up")
        self._check_optimizers()
        self._check_schedule()
        self._check_types()

    def _check_optimizers(self) -> None:
        if not self.optimizers or not all(isinstance(one, torch.optim.Optimizer) for one in self.optimizers):
            raise TypeError(f"Task(optimizer={self.optimizer!r}): give one torch.optim.Optimizer or several")

    def _check_schedule(self) -> None:
        if isinstance(self.schedule, Rates):
            self.schedule.check(self.num_steps)
            return
        for one in self.given_schedules:
            if isinstance(one, ReduceLROnPlateau):
                raise TypeError(
                    "Task(schedule=ReduceLROnPlateau): it is stepped with a score after a validation, not after each "
                    "step; write the loop with a Session, or give Rates(...)"
                )
            if not isinstance(one, LRScheduler):
                raise TypeError(f"Task(schedule={one!r}): give Rates(...) or torch schedulers")
            if not any(one.optimizer is optimizer for optimizer in self.optimizers):
                raise ValueError(
                    f"Task(schedule={type(one).__name__}) is for an optimizer that the task does not have; make it for "
                    "the one that is given"
                )

    def _check_types(self) -> None:
        if self.validation is not None and not isinstance(self.validation, Validation):
            raise TypeError(f"Task(validation={type(self.validation).__name__}): give Validation(data=...)")
        if not isinstance(self.checkpoints, Checkpoints):
            raise TypeError(f"Task(checkpoints={self.checkpoints!r}): give Checkpoints(...)")
        if not isinstance(self.options, SessionOptions):
            raise TypeError(f"Task(options={self.options!r}): give SessionOptions(...)")
        for one in self.callbacks:
            if not isinstance(one, Callback):
                raise TypeError(f"Task(callbacks=[{one!r}]): give objects whose class derives from Callback")
            if one.workers not in ("main", "all"):
                raise ValueError(f"{type(one).__name__}.workers={one.workers!r}: give 'main' or 'all'")

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """All of them, whether one was given or several."""
        given = self.optimizer
        return tuple(given) if isinstance(given, Sequence) else (given,)

    @property
    def given_schedules(self) -> tuple[LRScheduler, ...]:
        """Those that were given as such; those of `Rates` are made by `fit`."""
        given = self.schedule
        if given is None or isinstance(given, Rates):
            return ()
        return tuple(given) if isinstance(given, Sequence) else (given,)

    @property
    def num_steps(self) -> int:
        """The steps of the whole training, if it is not ended early."""
        return self.epochs * -(-len(self.data) // self.global_batch)
