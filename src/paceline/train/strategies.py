"""Which strategy a session has, by one word.

    allreduce   every worker holds the whole model; gradients are added up by the workers
    server      parameters and tables are on servers, which make the updates
    hybrid      dense parameters by all-reduce, tables on servers

Alone, all three are the same: one process holds everything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.strategy.allreduce import AllReduce
from paceline.strategy.base import Strategy, StrategyHost
from paceline.strategy.options import SessionOptions
from paceline.strategy.replicated import ReplicatedTables
from paceline.strategy.served import ServedParameters
from paceline.strategy.served_leases import ServerLeases
from paceline.strategy.served_steps import ServerSteps
from paceline.strategy.sparse import Sparse
from paceline.strategy.updater import MakeStrategy


def strategy_for(
    options: SessionOptions, optimizers: Sequence[torch.optim.Optimizer], host: StrategyHost, *, is_alone: bool
) -> MakeStrategy | None:
    """How gradients become an update by these options; None for the usual way."""
    if is_alone or options.strategy == "allreduce":
        return None

    def make(sparse: Sparse, trained: Mapping[str, torch.Tensor]) -> Strategy:
        has_dense = options.strategy == "server"
        if not has_dense and not sparse.specs:
            raise ValueError(
                "strategy='hybrid' keeps tables on servers, and the model has none; use paceline.nn.Embedding for what "
                "should be there, or strategy='allreduce'"
            )
        served = ServedParameters(sparse, optimizers, trained, host, has_dense=has_dense)
        if options.mode.is_leased:
            return ServerLeases(served)
        if has_dense:
            return ServerSteps(served)
        tables = ReplicatedTables(Sparse({}, optimizers, 0))
        return ServerSteps(served, AllReduce(optimizers, tables, overlaps=options.batch_norm == "local"))

    return make


def served_by(strategy: Strategy) -> ServedParameters | None:
    """What this strategy has on servers, if it has any there."""
    return strategy.served if isinstance(strategy, ServerSteps | ServerLeases) else None
