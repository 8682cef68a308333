"""Paceline trains one PyTorch model on whatever machines there are. See README.md.

What a script needs is here. Beside it are `paceline.errors`, `paceline.callbacks`, `paceline.nn` (tables on servers)
and `paceline.data`.
"""

import importlib as _importlib
import typing as _typing

from paceline import errors

if _typing.TYPE_CHECKING:
    from paceline import callbacks, data, nn
    from paceline.engine import launch
    from paceline.train import (
        Best,
        Checkpoints,
        EarlyStopping,
        Every,
        Fitted,
        LoaderOptions,
        Rates,
        Session,
        SessionOptions,
        Task,
        Total,
        Validation,
        WarmUp,
        fit,
        load_model,
        warm_up,
    )

__version__ = "0.1.0"

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
    "callbacks",
    "data",
    "errors",
    "fit",
    "launch",
    "load_model",
    "nn",
    "warm_up",
]

_MODULES = {"callbacks", "data", "nn"}


def __getattr__(name: str) -> _typing.Any:
    """Training needs torch, whose import takes a second; commands that do without are spared it."""
    if name not in __all__:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    if name in _MODULES:
        return _importlib.import_module(f"paceline.{name}")
    return getattr(_importlib.import_module("paceline.engine" if name == "launch" else "paceline.train"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
