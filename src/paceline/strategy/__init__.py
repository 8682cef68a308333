"""How gradients become one update of the model. The contract is in `base`; `allreduce` is the one way so far."""

from paceline.strategy.allreduce import AllReduce
from paceline.strategy.base import (
    Agreement,
    Contribution,
    Disagreement,
    Diverged,
    Flag,
    Notice,
    Strategy,
    StrategyError,
)

__all__ = [
    "Agreement",
    "AllReduce",
    "Contribution",
    "Disagreement",
    "Diverged",
    "Flag",
    "Notice",
    "Strategy",
    "StrategyError",
]
