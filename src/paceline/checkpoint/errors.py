"""What can go wrong with a checkpoint.

    CheckpointError             cannot be written, read or removed; the message says what to do
    ├── CorruptCheckpoint       not what was written: bytes changed, files missing or cut short
    └── DiskFull                no room; names the path, the bytes needed and the bytes free

State that cannot be saved at all is a plain `TypeError`, which names the place in the tree.
"""

from __future__ import annotations

from pathlib import Path

from paceline.errors import PacelineError


class CheckpointError(PacelineError):
    """A checkpoint cannot be written, read or removed."""


class CorruptCheckpoint(CheckpointError):
    """A checkpoint is not what was written."""


class DiskFull(CheckpointError):
    """There is no room for a checkpoint."""

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        super().__init__(
            f"no room for a checkpoint in {path}: it needs {needed_bytes:,} bytes and {free_bytes:,} are free; make "
            "room there, keep fewer checkpoints, or choose a folder on another disk"
        )
        self.path = path
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
