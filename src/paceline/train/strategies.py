"""Which strategy a session has, by one word.

    allreduce   every worker holds the whole model; gradients are added up by the workers
    server      parameters and tables are on servers, which make the updates
    hybrid      dense parameters by all-reduce, tables on servers

Alone, all three are the same: one process holds everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from paceline.strategy.aggregation import Aggregation, Reduced
from paceline.strategy.options import SessionOptions
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.served import ServerAggregation
from paceline.strategy.sparse import Sparse

Aggregate = Callable[[Sparse, Mapping[str, torch.Tensor]], Aggregation]


def aggregate_for(
    options: SessionOptions,
    optimizers: Sequence[torch.optim.Optimizer],
    tell: Callable[[str, str], None],
    recall: Callable[[bool], int],
    is_loader: Callable[[], bool],
    *,
    is_alone: bool,
) -> Aggregate | None:
    """How gradients are aggregated by these options; None for the usual way."""
    if is_alone or options.strategy == "allreduce":
        return None

    def make(sparse: Sparse, trained: Mapping[str, torch.Tensor]) -> Aggregation:
        if options.strategy == "server":
            return ServerAggregation(sparse, optimizers, trained, tell, recall, is_loader)
        if not sparse.specs:
            raise ValueError(
                "strategy='hybrid' keeps tables on servers, and the model has none; use paceline.nn.Embedding for what "
                "should be there, or strategy='allreduce'"
            )
        dense = Reduced(optimizers, ReplicatedTables(Sparse({}, optimizers, 0)), overlaps=options.batch_norm == "local")
        return ServerAggregation(sparse, optimizers, trained, tell, recall, is_loader, dense)

    return make
