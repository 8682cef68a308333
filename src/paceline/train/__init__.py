"""What a training script calls: `Session`, and `fit` for those who want no loop."""

from paceline.checkpoint.weights import load_model
from paceline.data.loader import LoaderOptions
from paceline.strategy.options import SessionOptions
from paceline.train.evaluation import Every, Total
from paceline.train.fitting import Fitted, fit
from paceline.train.rates import Rates, WarmUp
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from paceline.train.task import Best, EarlyStopping, Task, Validation
from paceline.train.warming import warm_up

__all__ = [
    "Best",
    "Checkpoints",
    "EarlyStopping",
    "Every",
    "Fitted",
    "LoaderOptions",
    "Rates",
    "Session",
    "SessionOptions",
    "Task",
    "Total",
    "Validation",
    "WarmUp",
    "fit",
    "load_model",
    "warm_up",
]
