"""A checkpoint between its snapshot and its publication.

    COPYING ─ WRITING ─ WRITTEN ─ PUBLISHED       WRITTEN waits until the operation is settled
         └────────┴────────┴───── DROPPED         discarded, or not settled when the keeper closed
                  └────────┴───── FAILED          `error` says why; also why one that was dropped had to wait

Stages are moved by the keeper only, under its lock; anybody may look and wait.
"""

from __future__ import annotations

import enum
import threading
from pathlib import Path

from paceline.checkpoint.files import Prepared
from paceline.checkpoint.stores import Draft


class SaveStage(enum.Enum):
    COPYING = "copying"
    WRITING = "writing"
    WRITTEN = "written"
    PUBLISHED = "published"
    DROPPED = "dropped"
    FAILED = "failed"

    @property
    def is_last(self) -> bool:
        return self in (SaveStage.PUBLISHED, SaveStage.DROPPED, SaveStage.FAILED)


class Pending:
    """`path` is where it is, or would be, when published."""

    def __init__(self, step: int, operation: int, path: Path, changed: threading.Condition) -> None:
        self.step = step
        self.operation = operation
        self.path = path
        self.stage = SaveStage.COPYING
        self.error: Exception | None = None
        self.waits_for_room = False  # the disk was full; it is tried again
        self.is_unwanted = False  # to be dropped by the keeper's thread as soon as it sees this
        self.prepared: Prepared | None = None
        self.draft: Draft | None = None
        self._changed = changed

    def wait_written(self, timeout_s: float) -> bool:
        """Wait until everything is on disk, or it ended otherwise; False if neither happened in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self.stage is SaveStage.WRITTEN or self.stage.is_last, timeout_s)

    def wait(self, timeout_s: float) -> SaveStage:
        """Wait for the last stage; returns the stage that was reached in time."""
        with self._changed:
            self._changed.wait_for(lambda: self.stage.is_last, timeout_s)
            return self.stage
