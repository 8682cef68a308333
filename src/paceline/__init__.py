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
    from paceline.train import (
        Checkpoints,
        Every,
        Evicted,
        LoaderOptions,
        NonFiniteGradient,
        Orphaned,
        Refused,
        RunFailed,
        Session,
        Total,
        TrainingError,
    )

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "CallFailed",
    "Checkpoints",
    "ConnectionLost",
    "DeadlineExceeded",
    "Every",
    "Evicted",
    "GroupAborted",
    "GroupClosed",
    "GroupError",
    "HandshakeRefused",
    "LoaderOptions",
    "Mismatch",
    "NonFiniteGradient",
    "Orphaned",
    "OutOfSharedMemory",
    "PacelineError",
    "PeerLost",
    "ProtocolError",
    "Refused",
    "RunFailed",
    "Session",
    "Total",
    "TrainingError",
    "WireError",
]


def __getattr__(name: str) -> _typing.Any:
    """Training needs torch, whose import takes a second; commands that do without are spared it."""
    if name in __all__:
        import paceline.train

        return getattr(paceline.train, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
