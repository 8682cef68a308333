"""Looks at a run again and again, whatever becomes of its database: not there yet, half made, locked, damaged,
replaced by another one. What goes wrong is told in words, and the next look tries again from the beginning.

Used by one thread. Nothing here writes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path

import msgspec

from paceline.control.journal.journal import DATABASE, JournalError
from paceline.control.journal.reader import EventRow, PlanRow, RunReader
from paceline.errors import PacelineError
from paceline.watch.look import LAST_EVENTS, Look, RecentSteps, describe


class Trouble(msgspec.Struct, frozen=True):
    """Why there is nothing to see just now."""

    text: str
    is_early: bool = False  # there is no run yet: that is no fault


class Follower:
    """`look` never raises. `take_events` gives every event once, in order, over all looks."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader: RunReader | None = None
        self._file: tuple[int, int] | None = None
        self._untaken: list[EventRow] = []
        self._forget()

    def _forget(self) -> None:
        """What is known of the database that was read."""
        self._steps = RecentSteps()
        self._plans: list[PlanRow] = []
        self._last_id = 0
        self._events: deque[EventRow] = deque(maxlen=LAST_EVENTS)
        self._sharing: EventRow | None = None

    def look(self) -> Look | Trouble:
        path = self._folder / DATABASE
        try:
            file = _identity(path)
            if file is None:
                self.close()
                self._file = None
                self._forget()
                return Trouble(f"there is no run in {self._folder} yet", is_early=True)
            if file != self._file:
                self.close()
                self._forget()  # another run has taken its place
                self._file = file
            return self._read()
        except (PacelineError, OSError, msgspec.MsgspecError, ValueError, TypeError) as error:
            # Also values that no writer of ours leaves there: a database can be anything.
            self.close()
            is_unfinished = isinstance(error, JournalError) and _is_empty(path)
            text = "the run is being prepared" if is_unfinished else f"{error or type(error).__name__}"
            return Trouble(text, is_early=is_unfinished)

    def _read(self) -> Look:
        reader = self._reader = self._reader or RunReader(self._folder)
        status = reader.status()
        fresh = reader.events(self._last_id)
        if fresh:
            self._last_id = fresh[-1].id
            self._events.extend(fresh)
            self._untaken.extend(fresh)
            self._sharing = next((event for event in reversed(fresh) if event.kind == "shares"), self._sharing)
        if fresh or not self._plans:
            self._plans = reader.plans()  # a plan is never made without an event
        steps = self._steps.update(reader, self._plans, status.num_steps)
        members, now = reader.members(), time.time()
        return describe(self._folder, status, members, steps, self._events, now, sharing=self._sharing)

    def take_events(self) -> list[EventRow]:
        taken, self._untaken = self._untaken, []
        return taken

    def close(self) -> None:
        if self._reader is not None:
            reader, self._reader = self._reader, None
            reader.close()


def _identity(path: Path) -> tuple[int, int] | None:
    """Which file it is; None for none."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        status = os.stat(path)
        return status.st_dev, status.st_ino
    return None


def _is_empty(path: Path) -> bool:
    """Whether the database is only just being made."""
    with contextlib.suppress(OSError):
        return path.stat().st_size == 0
    return True
