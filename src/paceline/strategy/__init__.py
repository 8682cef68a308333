"""How gradients become one update of the model. The contract is in `base`, an implementation in a file of its own."""

from paceline.strategy.base import Agreement, Contribution, Flag, Notice, Strategy
from paceline.strategy.updater import Updater

__all__ = [
    "Agreement",
    "Contribution",
    "Flag",
    "Notice",
    "Strategy",
    "Updater",
]
