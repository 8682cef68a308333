"""The gradients of one worker's share of a batch: `loss_fn` is called on it, in pieces where it must be, and what
backward makes goes into the strategy's store.

The global loss is sum(loss_i * w_i) / sum(w_i), and the gradient likewise. Where weights are sample counts, their sum
is known before backward and the gradients come out right at once; where `loss_fn` returns weights, the sum is known
after the header and the gradients are multiplied once more.

Invariants: nothing of the model changes here; buffers are staged. Each attempt at a step draws the same random numbers
on the same rank, and the script's own generator does not notice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.collective import Group
from paceline.errors import StrategyError
from paceline.strategy import batch_norm, digests, loss_calls, memory, refusals
from paceline.strategy.base import Check, Contribution, LossFn
from paceline.strategy.buffers import ModelBuffers
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.memory import MemoryLimit
from paceline.strategy.numerics import is_finite
from paceline.strategy.options import SessionOptions
from paceline.strategy.parameters import Modules, collect, named_modules, named_tables
from paceline.strategy.sparse import RowGradients, Sparse


class Gradients:
    """`check` is called often during `compute`, and may raise to end it."""

    def __init__(
        self,
        modules: Modules,
        optimizers: Sequence[torch.optim.Optimizer],
        options: SessionOptions,
        check: Check,
    ) -> None:
        self._modules = named_modules(modules)
        refusals.check_models(self._modules)
        self.norms = batch_norm.norms_for(options.batch_norm, self._modules)
        refusals.check_optimizers(optimizers)
        refusals.check_updated(self._modules, optimizers)
        self._optimizers = optimizers
        self._seed = options.seed
        self.micro_batch = options.micro_batch
        self._memory = MemoryLimit()
        self._check = check
        self.buffers = ModelBuffers(self._modules)
        self._collector: Collector | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._idle: set[int] = set()  # parameters that got no gradient once
        self._fewest = 1  # samples of one call
        self.sparse = Sparse(named_tables(self._modules), optimizers, options.seed)
        self.rows: RowGradients = {}  # of tables, of the last attempt
        # To optimizers a table is a parameter without elements, which has no gradient.
        self._stand_ins = {id(table.weight) for table in self.sparse.modules.values()}

    # -- the parameters ----------------------------------------------------------------------------------------------

    def trained(self) -> dict[str, torch.Tensor]:
        """The parameters that get gradients now, by name."""
        found = collect(self._modules, self._optimizers)
        refusals.check_parameters(found)
        if self._parameters:
            refusals.check_known(self._parameters, found, self._optimizers)
        self._parameters, self._idle = found, set()
        return {
            name: parameter
            for name, parameter in self._parameters.items()
            if parameter.requires_grad and id(parameter) not in self._stand_ins
        }

    def lay_out(self, store_for: Callable[[Mapping[str, torch.Tensor]], GradientStore]) -> GradientStore:
        """A place for the gradient of every parameter that is trainable now."""
        self.close()
        self.buffers.refresh()
        self._fewest = 2 if self.needs_two_samples() else 1
        trained = self.trained()
        self._laid_out_for = self._what_is_trained()
        store = store_for(trained)
        self._collector = Collector(trained, store, self._check)
        return store

    def is_laid_out(self) -> bool:
        """False when the script froze or thawed something, or gave an optimizer others; cheap."""
        return self._what_is_trained() == self._laid_out_for

    def _what_is_trained(self) -> tuple[list[int], list[bool]]:
        updated = [
            id(one) for optimizer in self._optimizers for group in optimizer.param_groups for one in group["params"]
        ]
        return updated, [parameter.requires_grad for parameter in self._parameters.values()]

    def _check_idle(self, used: Sequence[bool]) -> None:
        """A parameter gets no gradient for the first time: is it still in the model, or was it replaced?"""
        if all(used):
            return
        idle = {number for number, is_used in enumerate(used) if not is_used}
        if not idle <= self._idle:
            self._idle |= idle
            self.check_known()

    def check_known(self) -> None:
        """Goes through the whole model: not for every step."""
        refusals.check_known(self._parameters, collect(self._modules, ()), self._optimizers)

    def sampled_digest(self) -> int:
        return digests.of_sampled(self._parameters.values())

    def state_digest(self) -> int:
        """64 bits over parameters, buffers and optimizer state: the same on two workers when their bits are."""
        return digests.of_state([*self._parameters.values(), *self.buffers.tensors()], self._optimizers)

    @property
    def limit(self) -> int:
        """The most samples of one call of `loss_fn` that fit into memory, as far as it is known; 0 for all."""
        return self._memory.limit

    @property
    def waited_s(self) -> float:
        """How long the last `compute` waited for other workers."""
        return self.norms.waited_s if self.norms is not None else 0.0

    def has_batch_statistics(self) -> bool:
        """Whether the model has layers that look at the batch."""
        return self.buffers.has_batch_statistics()

    def needs_two_samples(self) -> bool:
        """Whether the model needs at least two samples a worker: such layers, by the worker's own samples."""
        return self.norms is None and self.has_batch_statistics()

    # -- computing ---------------------------------------------------------------------------------------------------

    def compute(
        self, loss_fn: LossFn, batch: Any, *, samples: int, total: int, step: int, group: Group | None, rank: int
    ) -> Contribution:
        """Collect the gradients of a share, in smaller pieces if the memory does not suffice."""
        exhausted = ""
        while True:
            try:
                found = self.attempt(loss_fn, batch, samples, total, step, group, rank)
                self._memory.sufficed(samples)
                return found
            except Exception as error:
                if not memory.is_exhausted(error):
                    if exhausted:
                        error.add_note(f"in an attempt in pieces, after the memory did not suffice ({exhausted})")
                    raise
                if self.norms is not None:
                    raise batch_norm.no_memory(step, samples) from error
                exhausted = f"{type(error).__name__}: {error}"
                self._memory.lower(error, min(samples, self._piece or samples), self._fewest)
                memory.release(error)

    @property
    def _piece(self) -> int | None:
        """The most samples of one call."""
        return min(filter(None, (self.micro_batch, self._memory.limit)), default=None)

    def attempt(
        self,
        loss_fn: LossFn,
        batch: Any,
        samples: int,
        total: int,
        step: int,
        group: Group | None,
        rank: int,
        *,
        is_dry_run: bool = False,
    ) -> Contribution:
        """Collect the gradients of a share once; leaves no trace but in the store."""
        collector = self.collector
        sizes = loss_calls.piece_sizes(samples, self._piece, self._fewest)
        collector.begin(len(sizes), is_dry_run=is_dry_run)
        self.sparse.begin()
        weight = weighted_loss = 0.0
        kinds: set[bool] = set()
        staged = self.buffers.expected()
        synced = batch_norm.together(self.norms, group, step, samples, len(sizes))
        if not samples:
            with synced:
                pass
        else:
            self.sparse.prepare(batch)
            if not is_dry_run:
                self.sparse.look_ahead()
            with (
                synced,
                collector.forgetting(),
                loss_calls.seeded(self._seed, step, rank),
                self.buffers.attempt() as stage,
                self.sparse.recording(),
                torch.enable_grad(),
            ):
                for piece_batch, piece_samples in loss_calls.pieces(batch, sizes):
                    self._check()
                    piece = loss_calls.call(loss_fn, piece_batch, piece_samples)
                    kinds.add(piece.explicit)
                    if len(kinds) > 1:
                        raise ValueError("loss_fn returned a weight for some micro-batches, but not for all; do either")
                    if self.norms is not None and not piece.weight:
                        raise batch_norm.no_weight(step)
                    if piece.weight > 0:  # the mean over nothing is not a number, but adds nothing
                        weight += piece.weight
                        weighted_loss += self._backward(piece, total)
                staged = stage()
        self.rows = self.sparse.finish()
        used = collector.finish()
        self._check_idle(used)
        return Contribution(step, samples, total, weight, weighted_loss, True in kinds, used, staged, loss_fn, batch)

    def _backward(self, piece: loss_calls.Piece, total: int) -> float:
        scale = piece.weight / total
        with self.collector.collecting():
            torch.autograd.backward(piece.loss, None if scale == 1.0 else torch.full_like(piece.loss, scale))
        self.sparse.collect()
        return float(piece.loss.detach()) * piece.weight

    def first_nonfinite(self) -> str:
        """The name of a parameter or table whose gradient, as it was collected, is not finite; empty if all are."""
        table = next((name for name, (_, rows) in self.rows.items() if not is_finite(rows)), "")
        return self.collector.first_nonfinite() or table

    # -- the end -----------------------------------------------------------------------------------------------------

    @property
    def collector(self) -> Collector:
        if self._collector is None:
            raise StrategyError("this strategy is bound to nothing: it was closed, or its last bind failed")
        return self._collector

    def close(self) -> None:
        """Take the hooks off the model."""
        if self._collector is not None:
            self._collector.close()
            self._collector = None
