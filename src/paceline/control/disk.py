"""Disks that are full: what is said, and what is done about writes that the training can do without.

ARCHITECTURE.md lists every write of a run with its policy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def free_bytes(path: Path) -> int | None:
    """What is free on the disk that a path is on, or would be; None where that cannot be known."""
    for place in (path, *path.parents):
        try:
            found = os.statvfs(place)
            return found.f_bavail * found.f_frsize
        except OSError:
            continue
    return None


def words_of(path: Path, error: Exception) -> str:
    """Which file cannot be written, why, and how much room there is."""
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    free = free_bytes(path)
    return f"{path} cannot be written: {why}" + (f" ({free:,} bytes are free there)" if free is not None else "")


class Cosmetic:
    """Writes to one file that the training can do without. A failure is told once, and once that they work again."""

    def __init__(self, path: Path, what: str, tell: Callable[[str], None]) -> None:
        self.path = path
        self._what = what
        self._tell = tell
        self.is_failing = False

    def attempt(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            self.failed(error)
            return False
        self.worked()
        return True

    def failed(self, error: OSError) -> None:
        if not self.is_failing:
            self.is_failing = True
            self._tell(f"{words_of(self.path, error)}; the run goes on without {self._what}, and it is tried again")

    def worked(self) -> None:
        if self.is_failing:
            self.is_failing = False
            self._tell(f"{self.path} can be written again")
