"""Synchronous training: the gradients of all workers become one update, which all make, or find made.

    compute    loss_fn on this worker's share; each gradient, scaled by weight / total, goes into the store
    reduce     what this worker has is added up or handed in; then the header, from which all conclude the same
    apply      the update, as all decided it

How gradients become an update is the aggregation's affair: added up by the workers, or by servers.

The global loss is sum(loss_i * w_i) / sum(w_i), and the gradient likewise. Where weights are sample counts, their sum
is known before backward and the gradients come out right at once; where `loss_fn` returns weights, the sum is known
after the header and the gradients are multiplied once more.

Invariants: parameters, buffers and optimizer state change in `apply` only, by the same bits on all ranks (given equal
ones before, and equal CPUs). A gradient that is not finite is never applied. Each attempt at a step draws the same
random numbers on the same rank, and the script's own generator does not notice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from paceline.collective import Group
from paceline.errors import StrategyError
from paceline.strategy import batch_norm, digests, header_checks, loss_calls, memory, refusals
from paceline.strategy.aggregation import Aggregation, BindPoint, Reduced
from paceline.strategy.base import Agreement, Check, Contribution, Flag, LossFn, Notice
from paceline.strategy.buffers import ModelBuffers, StagedBuffers
from paceline.strategy.collector import Collector
from paceline.strategy.header import HeaderRows, Row, exchange, exchange_text
from paceline.strategy.memory import MemoryLimit
from paceline.strategy.numerics import Examined, clip_factor, is_finite
from paceline.strategy.options import SessionOptions
from paceline.strategy.parameters import Modules, Optimizers, collect, listed, named_modules, named_tables
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.sparse import RowGradients, Sparse
from paceline.watch import spans

_ALL_USED = 1


def _nothing() -> None:
    pass


class Own(NamedTuple):
    """The gradients of one worker as an update of their own; `factor` is left to multiply with."""

    loss: float
    factor: float
    is_finite: bool
    rows: RowGradients
    used: tuple[bool, ...]
    reason: str


class Synchronous:
    """A step with a gradient that is not finite does not count; whether the run then goes on or ends is for the session
    to carry out. Every `verify_every` steps the workers compare samples of their parameters (0: never). `check` is
    called often during `compute`, and may raise to end it. `aggregate` makes the aggregation from the tables of the
    model; all-reduce by default, and then not during backward where batch statistics are exchanged."""

    def __init__(
        self,
        modules: Modules,
        optimizers: Optimizers,
        options: SessionOptions = SessionOptions(),
        *,
        verify_every: int = 100,
        check: Check = _nothing,
        aggregate: Callable[[Sparse, Mapping[str, torch.Tensor]], Aggregation] | None = None,
    ) -> None:
        self._optimizers = listed(optimizers)
        self._modules = named_modules(modules)
        refusals.check_models(self._modules)
        self._norms = batch_norm.norms_for(options.batch_norm, self._modules)
        refusals.check_optimizers(self._optimizers)
        refusals.check_updated(self._modules, self._optimizers)
        self.nonfinite = options.nonfinite
        self._seed = seed = options.seed
        self._clip_norm = options.clip_norm
        self._micro_batch = options.micro_batch
        self._memory = MemoryLimit()
        self._verify_every = verify_every
        self._check = check
        settings = {
            "seed": seed,
            "clip_norm": options.clip_norm,
            "nonfinite": options.nonfinite,
            "verify_every": verify_every,
        }
        self._hyper = digests.HyperParameters(self._optimizers, settings)
        self._buffers = ModelBuffers(self._modules)
        self._collector: Collector | None = None
        self._parameters: dict[str, torch.Tensor] = {}
        self._idle: set[int] = set()  # parameters that got no gradient once
        self.sparse = Sparse(named_tables(self._modules), self._optimizers, seed)
        self._row_gradients: RowGradients = {}
        # To optimizers a table is a parameter without elements, which has no gradient.
        self._stand_ins = {id(table.weight) for table in self.sparse.modules.values()}
        if aggregate is None:
            self._aggregation: Aggregation = Reduced(
                self._optimizers, ReplicatedTables(self.sparse), overlaps=self._norms is None
            )
            self.bind(None, 0, 1)
        else:
            self._aggregation = aggregate(self.sparse, self._trained())
            self._buffers.refresh()

    # -- who takes part ----------------------------------------------------------------------------------------------

    @property
    def aggregation(self) -> Aggregation:
        return self._aggregation

    def bind(self, group: Group | None, rank: int, size: int, standing: BindPoint = BindPoint()) -> None:
        """Work with this group from now on, in memory that it shares; None when alone."""
        if (rank, size) != ((group.rank, group.size) if group is not None else (0, 1)):
            raise ValueError(f"rank {rank} of {size} is not this member's place in {group}")
        self._group = group if size > 1 else None
        self._rank = rank
        self._standing = standing
        self._lay_out()

    def _lay_out(self) -> None:
        """A place for the gradient of every parameter that is trainable now."""
        self._close_collector()
        self._newest: Contribution | None = None
        self._agreed: Agreement | None = None
        self._buffers.refresh()
        self._fewest = 2 if self.needs_two_samples() else 1  # of one call
        trained = self._trained()
        self._laid_out_for = self._what_is_trained()
        self._store = self._aggregation.lay_out(self._group, trained, self._standing)
        self._collector = Collector(trained, self._store, self._check)

    def _trained(self) -> dict[str, torch.Tensor]:
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

    def _what_is_trained(self) -> tuple[list[int], list[bool]]:
        """Differs when the script froze or thawed something, or gave an optimizer others; cheap."""
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
            self._check_known()

    def _check_known(self) -> None:
        """Goes through the whole model: not for every step."""
        refusals.check_known(self._parameters, collect(self._modules, ()), self._optimizers)

    # -- a step ------------------------------------------------------------------------------------------------------

    def compute(self, loss_fn: LossFn, batch: Any, *, samples: int, total: int, step: int) -> Contribution:
        if not 0 <= samples <= total or total < 1:
            raise ValueError(f"samples={samples} must be from 0 to total={total}, and total at least 1")
        spans.step(step)
        if self._what_is_trained() != self._laid_out_for:
            self._lay_out()
        if self._verify_every > 0 and step % self._verify_every == 0:
            self._check_known()
        self._newest = self._agreed = None
        exhausted = ""
        while True:
            try:
                self._newest = self._attempt(loss_fn, batch, samples, total, step)
                self._memory.sufficed(samples)
                return self._newest
            except Exception as error:
                if not memory.is_exhausted(error):
                    if exhausted:
                        error.add_note(f"in an attempt in pieces, after the memory did not suffice ({exhausted})")
                    raise
                if self._norms is not None:
                    raise batch_norm.no_memory(step, samples) from error
                exhausted = f"{type(error).__name__}: {error}"
                self._memory.lower(error, min(samples, self._piece or samples), self._fewest)
                memory.release(error)

    def reduce(self, contribution: Contribution, notice: Notice) -> Agreement:
        if contribution is not self._newest:
            raise StrategyError("this contribution is void: another was computed, or a group was bound, after it")
        rows = self._meet(contribution, notice, self._store.reduce)
        if rows.any(Flag.LATE):
            rows = self._meet(contribution, notice, self._store.reduce_late)
        header_checks.compare(self._group, rows, self._hyper, contribution.total)
        total_weight = header_checks.total_weight(rows)
        loss = rows.total("weighted_loss") / total_weight
        if rows.any(Flag.NONFINITE):
            named, reason = self._find_nonfinite(contribution, rows)
            self._agreed = Agreement(False, loss, total_weight, rows, nonfinite=named, reason=reason)
        else:
            factor, norm = self._find_factor(contribution, rows, total_weight)
            used = self._used_by_anyone(contribution, rows)
            settling = self._aggregation.decide(contribution.step, factor, self._collected, used)
            buffers = self._reduce_buffers(contribution, rows)
            self._agreed = Agreement(True, loss, total_weight, rows, norm=norm, buffers=buffers, settling=settling)
        self._newest = None
        return self._agreed

    def judge_own(self, contribution: Contribution) -> Own:
        """What this worker's gradients come to by themselves, where they become an update without the others'."""
        if contribution is not self._newest:
            raise StrategyError("this contribution is void: another was computed, or a group was bound, after it")
        self._newest = None
        examined = Examined(wants_norm=self._clip_norm is not None)
        self._store.reduce(examined)
        for _, gradients in self._row_gradients.values():
            examined.look(gradients.reshape(-1))
        loss = contribution.weighted_loss / contribution.weight if contribution.weight else math.nan
        if not examined.finite:
            name = self._collected.first_nonfinite() or self._first_nonfinite_table() or "a parameter"
            return Own(
                loss, 1.0, False, self._row_gradients, contribution.used, f"the gradient of {name} is not finite"
            )
        factor = contribution.total / contribution.weight if contribution.explicit else 1.0
        if self._clip_norm is not None:
            factor *= clip_factor(factor * math.sqrt(examined.squares), self._clip_norm)
        return Own(loss, factor, True, self._row_gradients, contribution.used, "")

    def apply(self, agreement: Agreement) -> None:
        if agreement is not self._agreed:
            raise StrategyError("this agreement is void: it was applied, or something was computed after it")
        self._agreed = None
        if not agreement.counts:
            return
        self._aggregation.apply()
        self.complete(agreement)

    def complete(self, agreement: Agreement) -> None:
        """What belongs to the update beside what the aggregation has made."""
        assert agreement.buffers is not None
        self._buffers.commit(agreement.buffers)

    @property
    def limit(self) -> int:
        return self._memory.limit

    # -- inside compute ----------------------------------------------------------------------------------------------

    @property
    def _piece(self) -> int | None:
        """The most samples of one call."""
        return min(filter(None, (self._micro_batch, self._memory.limit)), default=None)

    def _attempt(
        self, loss_fn: LossFn, batch: Any, samples: int, total: int, step: int, *, is_dry_run: bool = False
    ) -> Contribution:
        """Collect the gradients of a share; leaves no trace but in the store."""
        collector = self._collected
        sizes = loss_calls.piece_sizes(samples, self._piece, self._fewest)
        collector.begin(len(sizes), is_dry_run=is_dry_run)
        self.sparse.begin()
        weight = weighted_loss = 0.0
        kinds: set[bool] = set()
        staged = self._buffers.expected()
        synced = batch_norm.together(self._norms, self._group, step, samples, len(sizes))
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
                loss_calls.seeded(self._seed, step, self._rank),
                self._buffers.attempt() as stage,
                self.sparse.recording(),
                torch.enable_grad(),
            ):
                for piece_batch, piece_samples in loss_calls.pieces(batch, sizes):
                    self._check()
                    piece = loss_calls.call(loss_fn, piece_batch, piece_samples)
                    kinds.add(piece.explicit)
                    if len(kinds) > 1:
                        raise ValueError("loss_fn returned a weight for some micro-batches, but not for all; do either")
                    if self._norms is not None and not piece.weight:
                        raise batch_norm.no_weight(step)
                    if piece.weight > 0:  # the mean over nothing is not a number, but adds nothing
                        weight += piece.weight
                        weighted_loss += self._backward(piece, total)
                staged = stage()
        self._row_gradients = self.sparse.finish()
        used = collector.finish()
        self._check_idle(used)
        return Contribution(step, samples, total, weight, weighted_loss, True in kinds, used, staged, loss_fn, batch)

    def _backward(self, piece: loss_calls.Piece, total: int) -> float:
        scale = piece.weight / total
        with self._collected.collecting():
            torch.autograd.backward(piece.loss, None if scale == 1.0 else torch.full_like(piece.loss, scale))
        self.sparse.collect()
        return float(piece.loss.detach()) * piece.weight

    # -- inside reduce -----------------------------------------------------------------------------------------------

    def _meet(self, contribution: Contribution, notice: Notice, reduce: Callable[[Examined], None]) -> HeaderRows:
        """Buckets, then the header."""
        examined = Examined(wants_norm=self._clip_norm is not None)
        with batch_norm.explaining(self._norms, contribution.step):
            reduce(examined)
        self._aggregation.hand_in(contribution.step, self._row_gradients, examined)
        return exchange(self._group, self._row(contribution, notice, examined))

    def _row(self, contribution: Contribution, notice: Notice, examined: Examined) -> Row:
        flags = notice.flags
        if not examined.finite:
            flags |= Flag.NONFINITE
        if contribution.explicit:
            flags |= Flag.WEIGHTED
        if self._store.has_late():
            flags |= Flag.LATE
        is_verified = self._verify_every > 0 and contribution.step % self._verify_every == 0
        return Row(
            operation=notice.operation,
            held=notice.held,
            flags=int(flags),
            hyper=self._hyper.digest(),
            sampled=digests.of_sampled(self._parameters.values()) if is_verified else 0,
            used=_summary(contribution.used),
            changed=contribution.buffers.digest,
            samples=contribution.samples,
            shares=notice.shares,
            # Who computes in pieces anyway can take any number of them.
            limit=self._memory.limit if self._micro_batch is None else 0,
            weight=contribution.weight,
            weighted_loss=contribution.weighted_loss,
            squares=examined.squares if examined.finite else 0.0,
            busy_s=notice.busy_s,
            reduced_s=notice.reduced_s,
        )

    def _find_factor(
        self, contribution: Contribution, rows: HeaderRows, total_weight: float
    ) -> tuple[float, float | None]:
        """What is left to multiply with: the weights' true sum, and clipping. The norm before that, if it is known."""
        factor = contribution.total / total_weight if rows.any(Flag.WEIGHTED) else 1.0
        norm = None
        if self._clip_norm is not None:
            norm = factor * math.sqrt(self._aggregation.squares(rows))
            factor *= clip_factor(norm, self._clip_norm)
        return factor, norm

    def _used_by_anyone(self, contribution: Contribution, rows: HeaderRows) -> Sequence[bool]:
        """Which parameters got a gradient on any worker; a second round only if workers differ."""
        said = {row.used for row in rows}
        if said <= {0, _ALL_USED}:
            return [_ALL_USED in said] * len(contribution.used)
        if len(said) == 1 or self._group is None:
            return contribution.used
        bitmap = torch.tensor(contribution.used, dtype=torch.uint8)
        self._group.all_reduce(bitmap, "max")
        return [bool(bit) for bit in bitmap.tolist()]

    def _reduce_buffers(self, contribution: Contribution, rows: HeaderRows) -> StagedBuffers:
        said = {row.changed for row in rows}
        if self._group is None or said == {0}:
            return contribution.buffers
        fraction = contribution.samples / contribution.total
        return self._buffers.reduce(self._group, contribution.buffers, len(said) == 1, fraction)

    def _find_nonfinite(self, contribution: Contribution, rows: HeaderRows) -> tuple[tuple[tuple[int, str], ...], str]:
        """Every worker computes its share once more, now by itself, and says what it finds."""
        c = contribution
        self._attempt(c.loss_fn, c.batch, c.samples, c.total, c.step, is_dry_run=True)
        mine = (self._collected.first_nonfinite() or self._first_nonfinite_table() or "").encode()
        found = [mine] if self._group is None else exchange_text(self._group, mine)
        named = tuple((rank, text.decode()) for rank, text in enumerate(found) if text)
        return named, header_checks.describe_nonfinite(contribution.step, named, rows)

    def _first_nonfinite_table(self) -> str | None:
        return next((name for name, (_, rows) in self._row_gradients.items() if not is_finite(rows)), None)

    # -- the rest ----------------------------------------------------------------------------------------------------

    @property
    def waited_s(self) -> float:
        """How long the last `compute` waited for other workers."""
        return self._norms.waited_s if self._norms is not None else 0.0

    def has_batch_statistics(self) -> bool:
        return self._buffers.has_batch_statistics()

    def needs_two_samples(self) -> bool:
        return self._norms is None and self.has_batch_statistics()

    def state_digest(self) -> int:
        return digests.of_state([*self._parameters.values(), *self._buffers.tensors()], self._optimizers)

    def close(self) -> None:
        self._close_collector()
        self._aggregation.close()

    def _close_collector(self) -> None:
        if self._collector is not None:
            self._collector.close()
            self._collector = None

    @property
    def _collected(self) -> Collector:
        if self._collector is None:
            raise StrategyError("this strategy is bound to nothing: it was closed, or its last bind failed")
        return self._collector


def _summary(used: Sequence[bool]) -> int:
    """0: none; 1: all; else a digest of the set."""
    if all(used):
        return _ALL_USED
    return digests.of_set(number for number, is_used in enumerate(used) if is_used) if any(used) else 0
