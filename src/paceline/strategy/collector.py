"""Takes each gradient from autograd as soon as it is made, and puts it into a store.

A hook on each parameter moves the gradient into the store while it is hot in the cache and clears `grad`. So autograd
hands over a fresh tensor each time (it never accumulates into the store's memory), the memory of that tensor is free
for the next one, and whatever the script does to `grad` meanwhile, as with `zero_grad()`, is harmless. A second
gradient of a parameter, from the next micro-batch or from re-entrant checkpointing, is added to the first.

The cheapest of the ways that were measured: zeroed views that autograd accumulates into take one more pass over
memory, and copies after the end of backward find nothing in the cache.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from paceline.strategy.base import Check
from paceline.strategy.numerics import Examined, is_finite
from paceline.strategy.refusals import check_gradient
from paceline.watch import spans


class GradientStore(Protocol):
    """Where the gradients of this worker lie, by number of the parameter."""

    def begin(self, num_pieces: int, *, is_dry_run: bool) -> None:
        """An attempt of so many micro-batches begins. After a dry run there is no `reduce`."""

    def give_up(self) -> None:
        """The attempt ended before all gradients were there."""

    def put(self, number: int, gradient: torch.Tensor) -> None: ...

    def add(self, number: int, gradient: torch.Tensor) -> None: ...

    def clear(self, number: int) -> None:
        """This worker has no gradient of that parameter."""

    def get(self, number: int) -> torch.Tensor: ...

    def reduce(self, examined: Examined) -> None:
        """Add up over all workers, and look at the part of the sum that is this worker's to examine."""

    def has_late(self) -> bool:
        """Whether gradients of this worker are missing in the sum; if on any, all workers call `reduce_late`."""

    def reduce_late(self, examined: Examined) -> None:
        """Add what is missing, and look again."""

    def scale(self, factor: float) -> None: ...


class Collector:
    def __init__(self, parameters: Mapping[str, torch.Tensor], store: GradientStore, check: Check) -> None:
        self.names: Sequence[str] = tuple(parameters)
        self._parameters = tuple(parameters.values())
        self._store = store
        self._check = check
        self._active = False
        self._filled = [False] * len(self._parameters)
        take = self._take_timed if spans.is_wanted() else self._take  # there are many parameters
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(functools.partial(take, number))  # type: ignore[no-untyped-call]
            for number, parameter in enumerate(self._parameters)
        ]

    def begin(self, num_pieces: int, *, is_dry_run: bool) -> None:
        """Forget what was collected."""
        self._filled = [False] * len(self._parameters)
        self.forget()
        self._store.begin(num_pieces, is_dry_run=is_dry_run)

    @contextlib.contextmanager
    def collecting(self) -> Iterator[None]:
        """The gradients of a backward in here are taken, and no others."""
        self.forget()
        self._active = True
        before = spans.mark("backward")
        try:
            yield
        finally:
            self._active = False
            spans.mark(before)

    @contextlib.contextmanager
    def forgetting(self) -> Iterator[None]:
        """Whatever `loss_fn` and an interrupted backward leave in `grad` is gone afterwards."""
        try:
            yield
        except BaseException:
            self._store.give_up()
            raise
        finally:
            self.forget()

    def finish(self) -> tuple[bool, ...]:
        """Complete the store with zeros; says which parameters got a gradient."""
        for number, filled in enumerate(self._filled):
            if not filled:
                self._store.clear(number)
        return tuple(self._filled)

    def publish(self, used: Sequence[bool]) -> None:
        """Let the optimizers see the gradients: `grad` of each parameter that was used, None of the others."""
        for number, (parameter, is_used) in enumerate(zip(self._parameters, used, strict=True)):
            parameter.grad = self._store.get(number) if is_used else None

    def forget(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def first_nonfinite(self) -> str | None:
        """The name of the first parameter, as backward comes to them, whose collected gradient is not finite."""
        for number in reversed(range(len(self.names))):
            if self._filled[number] and not is_finite(self._store.get(number)):
                return self.names[number]
        return None

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self.forget()

    def _take(self, number: int, parameter: torch.Tensor) -> None:
        if not self._active:
            return
        self._check()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        check_gradient(self.names[number], gradient)
        if self._filled[number]:
            self._store.add(number, gradient)
        else:
            self._filled[number] = True
            self._store.put(number, gradient)

    def _take_timed(self, number: int, parameter: torch.Tensor) -> None:
        before = spans.mark("copy")
        self._take(number, parameter)
        spans.mark(before)
