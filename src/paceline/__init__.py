"""Paceline trains one PyTorch model on whatever machines there are. See README.md."""

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

__version__ = "0.1.0"

__all__ = [
    "AddressError",
    "CallFailed",
    "ConnectionLost",
    "DeadlineExceeded",
    "GroupAborted",
    "GroupClosed",
    "GroupError",
    "HandshakeRefused",
    "Mismatch",
    "OutOfSharedMemory",
    "PacelineError",
    "PeerLost",
    "ProtocolError",
    "WireError",
]
