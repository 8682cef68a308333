"""What a training script calls: `Session`, and `fit` for those who want no loop."""

from paceline.checkpoint.weights import load_model
from paceline.data.loader import LoaderOptions
from paceline.train.callbacks import Callback, EpochInfo, JsonLines, PrintProgress, RunInfo, StepInfo, ValidationInfo
from paceline.train.errors import Evicted, NonFiniteGradient, Orphaned, Refused, RunFailed, TrainingError
from paceline.train.evaluation import Every, Total
from paceline.train.fitting import Fitted, fit
from paceline.train.rates import Rates, WarmUp
from paceline.train.saving import Checkpoints
from paceline.train.session import Epoch, Session
from paceline.train.task import Best, EarlyStopping, Options, Task, Validation
from paceline.train.warming import warm_up

__all__ = [
    "Best",
    "Callback",
    "Checkpoints",
    "EarlyStopping",
    "Epoch",
    "EpochInfo",
    "Every",
    "Evicted",
    "Fitted",
    "JsonLines",
    "LoaderOptions",
    "NonFiniteGradient",
    "Options",
    "Orphaned",
    "PrintProgress",
    "Rates",
    "Refused",
    "RunFailed",
    "RunInfo",
    "Session",
    "StepInfo",
    "Task",
    "Total",
    "TrainingError",
    "Validation",
    "ValidationInfo",
    "WarmUp",
    "fit",
    "load_model",
    "warm_up",
]
