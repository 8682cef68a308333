"""Disks that are full: what is said, and what is done about writes that the training can do without.

Messages name the path and what is free there. Every write of a run has a policy:

    coordinator   what must be remembered    1 MiB is reserved in `run.db` and its log. When that is used up, the
                  (`commit`)                 coordinator waits up to 10 minutes for room; it decides nothing and tells
                                             nobody anything meanwhile. Steps need no coordinator and go on. One that
                                             cannot begin ends with exit code 74; its agent starts it again for 10
                                             minutes, and counts none of these as deaths
                  progress and metrics       cosmetic: refused below 256 KiB, kept by the workers, recorded when there
                  (`record`)                 is room. Leases that are done, and the last status, may use the reserve
                  `access.json`, its lock    cosmetic: those of the coordinator before lead to the same place
    main worker   checkpoints                wait in memory, tried every second until there is room or a newer one
                                             takes their place. At the end the run waits for 5 minutes at each of
                                             writing and publishing; in vain, the exit code is 78. On a joined host
                                             whose disk is full they are sent to the run's host from memory
    agent         `workers.json`             cosmetic: written whole at the next start of a process
                  logs of its processes      cosmetic: lost lines are counted, and the log says how many are missing
                  `agent.log`                cosmetic: lines wait in memory
                  `coordinator.log`          cosmetic: the coordinator is started without one

What is cosmetic is told once.
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
