"""What is said of ranges whose last copy died with a server: only what no worker has."""

from __future__ import annotations

import pytest
import torch

from paceline.server.layout import lay_out
from paceline.strategy.served_state import ServedState
from paceline.strategy.sparse import Sparse


def state_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> ServedState:
    layout = lay_out({"weight": parameter}, [optimizer], has_tables=True)
    return ServedState(layout, Sparse({}, [optimizer], seed=0), [optimizer])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_keeps_nothing_loses_nothing(momentum: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    state = state_of(torch.optim.SGD([parameter], lr=0.1, momentum=momentum), parameter)
    told = state.describe_loss({0}, step=3)
    assert ("what optimizers kept for 8 parameters" in told) is bool(momentum)
    assert bool(told) is bool(momentum)


def test_rows_are_lost_also_where_the_optimizer_keeps_nothing() -> None:
    parameter = torch.nn.Parameter(torch.zeros(8))
    told = state_of(torch.optim.SGD([parameter], lr=0.1), parameter).describe_loss({0, 1}, step=3)
    assert "1 of 64 parts of the tables' rows" in told
    assert "optimizers" not in told
