"""What a training script calls: `Session`, and `fit` for those who want no loop."""

from paceline.data.loader import LoaderOptions
from paceline.train.errors import Evicted, NonFiniteGradient, Orphaned, Refused, RunFailed, TrainingError
from paceline.train.evaluation import Every, Total
from paceline.train.saving import Checkpoints
from paceline.train.session import Epoch, Session

__all__ = [
    "Checkpoints",
    "Epoch",
    "Every",
    "Evicted",
    "LoaderOptions",
    "NonFiniteGradient",
    "Orphaned",
    "Refused",
    "RunFailed",
    "Session",
    "Total",
    "TrainingError",
]
