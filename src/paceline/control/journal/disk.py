"""Disks that are full: what is said, and what is done about writes that the training can do without.

ARCHITECTURE.md lists every write of a run with its policy.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable
from pathlib import Path

from paceline.custody import partial

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LITTLE_BYTES = 1 << 16  # with less, files that SQLite cannot make or extend are taken to lack room
_UNCLEAR = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)


def free_bytes(path: Path) -> int | None:
    """What is free on the disk that a path is on, or would be; None where that cannot be known."""
    for place in (path, *path.parents):
        try:
            return partial.free_bytes(place)
        except OSError:
            continue
    return None


def is_want_of_room(error: BaseException | None, path: Path) -> bool:
    """Whether this error, or what it was raised from, is of a full disk."""
    while error is not None:
        code = getattr(error, "sqlite_errorcode", 0)
        if code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in NO_ROOM):
            return True
        if code & 0xFF in _UNCLEAR and (free := free_bytes(path)) is not None and free < _LITTLE_BYTES:
            return True
        error = error.__cause__
    return False


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
