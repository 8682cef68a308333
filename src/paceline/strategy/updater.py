"""An update of the model, step by step: what a loop calls.

    bind(group, rank, size)        at the start and after every change of membership, with the new group (None: alone)
    compute(loss_fn, batch, ...)   this worker's share; each gradient, scaled by weight / total, goes into the store
    exchange(contribution, notice) add up or hand in; then the header, from which all workers conclude the same
    apply(agreement)               the update, as all decided it

How gradients become an update is the strategy's affair (`base.py`): added up by the workers, or by servers.

A group between hosts may send gradients while `compute` makes more of them. So `compute` is called with such a group
only for a step that all its members take, and when it raises there, the group may be over: bind another one.

Invariants: parameters, buffers and optimizer state change in `apply` only, by the same bits on all ranks (given equal
ones before, and equal CPUs). A gradient that is not finite is never applied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from paceline.collective import Group
from paceline.errors import StrategyError
from paceline.strategy import batch_norm, digests, header_checks
from paceline.strategy.allreduce import AllReduce
from paceline.strategy.base import Agreement, BindPoint, Check, Contribution, Flag, LossFn, Notice, Strategy
from paceline.strategy.buffers import StagedBuffers
from paceline.strategy.gradients import Gradients
from paceline.strategy.header import HeaderRows, Row, exchange, exchange_text
from paceline.strategy.numerics import Examined, clip_factor
from paceline.strategy.options import SessionOptions
from paceline.strategy.parameters import Modules, Optimizers, listed
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.sparse import Sparse
from paceline.watch import spans

_ALL_USED = 1

MakeStrategy = Callable[[Sparse, Mapping[str, torch.Tensor]], Strategy]


def _nothing() -> None:
    pass


class Updater:
    """A step with a gradient that is not finite does not count; whether the run then goes on or ends is for the loop to
    carry out. Every `verify_every` steps the workers compare samples of their parameters (0: never). `check` is called
    often during `compute`, and may raise to end it. `make_strategy` makes the strategy from the tables of the model;
    all-reduce by default, and then not during backward where batch statistics are exchanged."""

    def __init__(
        self,
        modules: Modules,
        optimizers: Optimizers,
        options: SessionOptions = SessionOptions(),
        *,
        verify_every: int = 100,
        check: Check = _nothing,
        make_strategy: MakeStrategy | None = None,
    ) -> None:
        given = listed(optimizers)
        self.gradients = Gradients(modules, given, options, check)
        self._clip_norm = options.clip_norm
        self._verify_every = verify_every
        settings = {
            "seed": options.seed,
            "clip_norm": options.clip_norm,
            "nonfinite": options.nonfinite,
            "verify_every": verify_every,
        }
        self._hyper = digests.HyperParameters(given, settings)
        if make_strategy is None:
            tables = ReplicatedTables(self.gradients.sparse)
            self.strategy: Strategy = AllReduce(given, tables, overlaps=self.gradients.norms is None)
            self.bind(None, 0, 1)
        else:
            self.strategy = make_strategy(self.gradients.sparse, self.gradients.trained())
            self.gradients.buffers.refresh()

    def bind(self, group: Group | None, rank: int, size: int, point: BindPoint = BindPoint()) -> None:
        """Work with this group from now on, in memory that it shares; None when alone. Whatever was computed before is
        void."""
        if (rank, size) != ((group.rank, group.size) if group is not None else (0, 1)):
            raise ValueError(f"rank {rank} of {size} is not this member's place in {group}")
        self._group = group if size > 1 else None
        self._rank = rank
        self._point = point
        self._lay_out()

    def _lay_out(self) -> None:
        self._newest: Contribution | None = None
        self._agreed: Agreement | None = None
        self._store = self.gradients.lay_out(lambda trained: self.strategy.attach(self._group, trained, self._point))

    # -- a step ------------------------------------------------------------------------------------------------------

    def compute(self, loss_fn: LossFn, batch: Any, *, samples: int, total: int, step: int) -> Contribution:
        """Compute this worker's share: `samples` of the `total` of step `step`; may be called again for the same step.
        With no samples the batch is None and `loss_fn` is not called."""
        if not 0 <= samples <= total or total < 1:
            raise ValueError(f"samples={samples} must be from 0 to total={total}, and total at least 1")
        if not self.gradients.is_laid_out():
            self._lay_out()
        if self._is_verified(step):
            self.gradients.check_known()
        self._newest = self._agreed = None
        spans.step(step)
        self._newest = self.gradients.compute(
            loss_fn, batch, samples=samples, total=total, step=step, group=self._group, rank=self._rank
        )
        return self._newest

    def exchange(self, contribution: Contribution, notice: Notice) -> Agreement:
        """Meet the others. Every member calls it, also one without samples; the same agreement on all, or `GroupError`
        when a member died."""
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
            settling = self.strategy.decide(contribution.step, factor, self.gradients.collector, used)
            buffers = self._reduce_buffers(contribution, rows)
            self._agreed = Agreement(True, loss, total_weight, rows, norm=norm, buffers=buffers, settling=settling)
        self._newest = None
        return self._agreed

    def apply(self, agreement: Agreement) -> None:
        """Update the model, or do nothing if the step does not count. Meets nobody."""
        if agreement is not self._agreed:
            raise StrategyError("this agreement is void: it was applied, or something was computed after it")
        self._agreed = None
        if not agreement.counts:
            return
        self.strategy.apply()
        self.complete(agreement)

    def complete(self, agreement: Agreement) -> None:
        """What belongs to the update beside what the strategy has made."""
        assert agreement.buffers is not None
        self.gradients.buffers.commit(agreement.buffers)

    # -- inside exchange ---------------------------------------------------------------------------------------------

    def _is_verified(self, step: int) -> bool:
        return self._verify_every > 0 and step % self._verify_every == 0

    def _meet(self, contribution: Contribution, notice: Notice, reduce: Callable[[Examined], None]) -> HeaderRows:
        """Buckets, then the header."""
        examined = Examined(wants_norm=self._clip_norm is not None)
        with batch_norm.explaining(self.gradients.norms, contribution.step):
            reduce(examined)
        self.strategy.exchange(contribution.step, self.gradients.rows, examined)
        return exchange(self._group, self._row(contribution, notice, examined))

    def _row(self, contribution: Contribution, notice: Notice, examined: Examined) -> Row:
        flags = notice.flags
        if not examined.finite:
            flags |= Flag.NONFINITE
        if contribution.explicit:
            flags |= Flag.WEIGHTED
        if self._store.has_late():
            flags |= Flag.LATE
        return Row(
            operation=notice.operation,
            held=notice.held,
            flags=int(flags),
            hyper=self._hyper.digest(),
            sampled=self.gradients.sampled_digest() if self._is_verified(contribution.step) else 0,
            used=_summary(contribution.used),
            changed=contribution.buffers.digest,
            samples=contribution.samples,
            shares=notice.shares,
            # Who computes in pieces anyway can take any number of them.
            limit=self.gradients.limit if self.gradients.micro_batch is None else 0,
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
            norm = factor * math.sqrt(self.strategy.squares(rows))
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
        return self.gradients.buffers.reduce(self._group, contribution.buffers, len(said) == 1, fraction)

    def _find_nonfinite(self, contribution: Contribution, rows: HeaderRows) -> tuple[tuple[tuple[int, str], ...], str]:
        """Every worker computes its share once more, now by itself, and says what it finds."""
        c = contribution
        self.gradients.attempt(c.loss_fn, c.batch, c.samples, c.total, c.step, self._group, self._rank, is_dry_run=True)
        mine = self.gradients.first_nonfinite().encode()
        found = [mine] if self._group is None else exchange_text(self._group, mine)
        named = tuple((rank, text.decode()) for rank, text in enumerate(found) if text)
        return named, header_checks.describe_nonfinite(contribution.step, named, rows)

    def close(self) -> None:
        """Take the hooks off the model and the optimizers."""
        self.gradients.close()
        self.strategy.close()


def _summary(used: Sequence[bool]) -> int:
    """0: none; 1: all; else a digest of the set."""
    if all(used):
        return _ALL_USED
    return digests.of_set(number for number, is_used in enumerate(used) if is_used) if any(used) else 0
