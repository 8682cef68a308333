"""How gradients become one update of the model. The contract is in `base`; `allreduce` is the one way so far."""

from paceline.strategy.base import Agreement, Contribution, Flag, Notice, Strategy
from paceline.strategy.synchronous import Synchronous

__all__ = [
    "Agreement",
    "Contribution",
    "Flag",
    "Notice",
    "Strategy",
    "Synchronous",
]
