"""What becomes of the gradients of a step: the part in which synchronous strategies differ.

`Synchronous` calls, on one thread: `lay_out` when a group is bound; for each step `hand_in` (before the header: all
workers do it), then, if the step counts, `squares` if the norm is wanted, `decide`, and `apply`, the only call that
changes parameters. What `hand_in` and `squares` raise ends the attempt; `apply` meets no other worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from paceline.collective import Group
from paceline.strategy.buckets import Buckets, Loose
from paceline.strategy.collector import Collector, GradientStore
from paceline.strategy.header import HeaderRows
from paceline.strategy.numerics import Examined
from paceline.strategy.overlap import Overlapped
from paceline.strategy.refusals import StepGuard
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.sparse import RowGradients
from paceline.watch import spans


class BindPoint(NamedTuple):
    """Where a worker stands when a group is bound: the generation of the plan, the last step that was applied, and how
    its update was decided (empty if that is of no concern). `founding` is that generation where the plan founds the
    run, else 0."""

    generation: int = 0
    step: int = 0
    settling: str = ""
    founding: int = 0


class Aggregation(Protocol):
    def lay_out(self, group: Group | None, trained: Mapping[str, torch.Tensor], standing: BindPoint) -> GradientStore:
        """Work with this group from now on; where the gradients of these parameters go."""

    def hand_in(self, step: int, rows: RowGradients, examined: Examined) -> None:
        """Give what this worker has computed, beside what the store's `reduce` has given."""

    def squares(self, rows: HeaderRows) -> float:
        """The square of the norm of the whole gradient, the same on all workers."""

    def decide(self, step: int, factor: float, collector: Collector, used: Sequence[bool]) -> str:
        """The step counts, and the gradients are multiplied by this; how it was decided, for who comes after."""

    def apply(self) -> None:
        """Make the update that was decided."""

    def gift(self) -> dict[str, Any]:
        """What a newcomer needs beside the model and the optimizers' states: "tables" by name."""

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids of a table's rows, in order, and the rows."""

    def full_state(self) -> dict[str, Any]:
        """What a checkpoint needs beside that: "tables", where they are elsewhere, and then "values" of parameters by
        their `id`, "optimizers" as their `state_dict` has them, and "leases", what has been applied to each range;
        "counts", what optimizers count, where ranges of one parameter differ. All of a range is of one moment."""

    def load(self, part: Mapping[str, Any]) -> None:
        """Become what `gift` or `full_state` gave; anything may be missing."""

    def close(self) -> None: ...


class Reduced:
    """All-reduce: every worker holds everything, adds up over all, and makes the same update. Between hosts gradients
    are sent while backward computes more of them, if `overlaps`."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], tables: ReplicatedTables, *, overlaps: bool = True
    ) -> None:
        self._overlaps = overlaps
        self._optimizers = optimizers
        self._tables = tables
        self._guard = StepGuard(optimizers)
        self._store: GradientStore = Loose()

    def lay_out(self, group: Group | None, trained: Mapping[str, torch.Tensor], standing: BindPoint) -> GradientStore:
        self._tables.bind(group)
        self._store = _store_for(group, trained, self._overlaps)
        return self._store

    def hand_in(self, step: int, rows: RowGradients, examined: Examined) -> None:
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
        self._tables.apply()
        spans.mark(before)

    def gift(self) -> dict[str, Any]:
        return {"tables": self._tables.state()}

    def table(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        return self._tables.table(name)

    def full_state(self) -> dict[str, Any]:
        return {}  # a newcomer gets everything too

    def load(self, part: Mapping[str, Any]) -> None:
        self._tables.load(part.get("tables", {}))

    def close(self) -> None:
        self._guard.close()


def _store_for(group: Group | None, parameters: Mapping[str, torch.Tensor], overlaps: bool) -> GradientStore:
    if group is None:
        return Loose()
    buckets = Buckets(group, parameters)
    # On one host the calling thread reduces faster than another one could beside backward.
    return Overlapped(buckets) if overlaps and len(group.hosts) > 1 else buckets
