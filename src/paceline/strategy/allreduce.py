"""All-reduce: every worker holds everything, adds up over all, and makes the same update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.collective import Group
from paceline.strategy.base import BindPoint, StrategyState
from paceline.strategy.buckets import Buckets, Loose
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.header import HeaderRows
from paceline.strategy.numerics import Examined
from paceline.strategy.overlap import Overlapped
from paceline.strategy.refusals import StepGuard
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.sparse import RowGradients
from paceline.watch import spans


class AllReduce:
    """Between hosts gradients are sent while backward computes more of them, if `overlaps`."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], tables: ReplicatedTables, *, overlaps: bool = True
    ) -> None:
        self._overlaps = overlaps
        self._optimizers = optimizers
        self._tables = tables
        self._guard = StepGuard(optimizers)
        self._store: GradientStore = Loose()

    @property
    def state(self) -> StrategyState:
        return self._tables

    def attach(self, group: Group | None, trained: Mapping[str, torch.Tensor], point: BindPoint) -> GradientStore:
        self._tables.bind(group)
        self._store = _store_for(group, trained, self._overlaps)
        return self._store

    def exchange(self, step: int, rows: RowGradients, examined: Examined) -> None:
        self._tables.gather(rows, examined)

    def squares(self, rows: HeaderRows) -> float:
        return rows.total("squares") + self._tables.squares()

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        if factor != 1.0:
            self._store.scale(factor)
        collector.publish(used)
        self._tables.decide(step, factor)
        return ""

    def apply(self) -> None:
        before = spans.mark("optimizer")
        with self._guard:
            for optimizer in self._optimizers:
                optimizer.step()
        spans.mark(before)
        self._tables.apply()

    def close(self) -> None:
        self._guard.close()


def _store_for(group: Group | None, parameters: Mapping[str, torch.Tensor], overlaps: bool) -> GradientStore:
    if group is None:
        return Loose()
    buckets = Buckets(group, parameters)
    # On one host the calling thread reduces faster than another one could beside backward.
    return Overlapped(buckets) if overlaps and len(group.hosts) > 1 else buckets
