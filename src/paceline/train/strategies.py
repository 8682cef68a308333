"""Which strategy a session has, by one word.

    allreduce   every worker holds the whole model; gradients are added up by the workers
    server      parameters and tables are on servers, which make the updates
    hybrid      dense parameters by all-reduce, tables on servers

Alone, all three are the same: one process holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, get_args

import torch

from paceline.strategy.aggregation import Aggregation, Reduced
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.served import Served
from paceline.strategy.sparse import Sparse

StrategyName = Literal["allreduce", "server", "hybrid"]

Aggregate = Callable[[Sparse, Mapping[str, torch.Tensor]], Aggregation]


def aggregate_for(
    name: str,
    optimizers: Sequence[torch.optim.Optimizer],
    tell: Callable[[str, str], None],
    recall: Callable[[bool], int],
    is_loader: Callable[[], bool],
    *,
    is_alone: bool,
    overlaps: bool = True,
) -> Aggregate | None:
    """How a synchronous strategy of this name aggregates; None for the usual way. `overlaps` as in `Reduced`."""
    if name not in get_args(StrategyName):
        raise ValueError(f"strategy={name!r}: use one of {', '.join(map(repr, get_args(StrategyName)))}")
    if is_alone or name == "allreduce":
        return None

    def make(sparse: Sparse, trained: Mapping[str, torch.Tensor]) -> Aggregation:
        if name == "server":
            return Served(sparse, optimizers, trained, tell, recall, is_loader)
        if not sparse.specs:
            raise ValueError(
                "strategy='hybrid' keeps tables on servers, and the model has none; use paceline.nn.Embedding for what "
                "should be there, or strategy='allreduce'"
            )
        dense = Reduced(optimizers, ReplicatedTables(Sparse({}, optimizers, 0)), overlaps=overlaps)
        return Served(sparse, optimizers, trained, tell, recall, is_loader, dense)

    return make
