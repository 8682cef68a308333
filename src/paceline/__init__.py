"""Paceline trains one PyTorch model on whatever machines there are. See README.md."""

import typing as _typing

from paceline.errors import (
    AddressError,
    CallFailed,
    ConnectionLost,
    DeadlineExceeded,
    GroupAborted,
    GroupClosed,
    GroupError,
    HandshakeRefused,
    Mismatch,
    OutOfSharedMemory,
    PacelineError,
    PeerLost,
    ProtocolError,
    WireError,
)

if _typing.TYPE_CHECKING:
    from paceline.engine import launch
    from paceline.train import (
        Best,
        Callback,
        Checkpoints,
        EarlyStopping,
        EpochInfo,
        Every,
        Evicted,
        Fitted,
        JsonLines,
        LoaderOptions,
        NonFiniteGradient,
        Options,
        Orphaned,
        PrintProgress,
        Rates,
        Refused,
        RunFailed,
        RunInfo,
        Session,
        StepInfo,
        Task,
        Total,
        TrainingError,
        Validation,
        ValidationInfo,
        WarmUp,
        fit,
        load_model,
        warm_up,
    )

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "Best",
    "CallFailed",
    "Callback",
    "Checkpoints",
    "ConnectionLost",
    "DeadlineExceeded",
    "EarlyStopping",
    "EpochInfo",
    "Every",
    "Evicted",
    "Fitted",
    "GroupAborted",
    "GroupClosed",
    "GroupError",
    "HandshakeRefused",
    "JsonLines",
    "LoaderOptions",
    "Mismatch",
    "NonFiniteGradient",
    "Options",
    "Orphaned",
    "OutOfSharedMemory",
    "PacelineError",
    "PeerLost",
    "PrintProgress",
    "ProtocolError",
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
    "WireError",
    "fit",
    "launch",
    "load_model",
    "nn",
    "warm_up",
]


def __getattr__(name: str) -> _typing.Any:
    """Training needs torch, whose import takes a second; commands that do without are spared it."""
    if name == "launch":
        import paceline.engine

        return paceline.engine.launch
    if name == "nn":
        import paceline.nn

        return paceline.nn
    if name in __all__:
        import paceline.train

        return getattr(paceline.train, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
