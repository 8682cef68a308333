"""Reads `run.db`, while a coordinator writes it or after it ended; never writes.

Every method is one consistent look. What may be long is asked for from a point on.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from paceline.control.journal.journal import DATABASE, VERSION, JournalError, MemberRow, wrong_version
from paceline.control.machines.agents import Starting

BUSY_S = 5.0

STARTING = "starting"  # the key of the processes that have not joined yet

Row = TypeVar("Row")
_starting = msgspec.json.Decoder(tuple[Starting, ...])


class RunStatus(msgspec.Struct, frozen=True):
    """`status` is gathering, running, fencing, ended, failed or interrupted (it was asked to stop, or its coordinator
    ended: the run can go on with --resume); times are seconds since 1970, 0 for not yet. `facts` are what all members
    have in common, `starting` the processes that have not joined yet."""

    name: str
    status: str
    reason: str
    started: float
    ended: float
    applied: int
    num_steps: int
    num_samples: int
    facts: dict[str, str]
    starting: tuple[Starting, ...] = ()


class EventRow(msgspec.Struct, frozen=True):
    id: int
    time: float
    term: int
    kind: str
    member: str
    text: str


class StepRecord(msgspec.Struct, frozen=True):
    """A loss that is not a number is None."""

    operation: int
    time: float
    generation: int
    epoch: int
    position: int
    count: int
    loss: float | None
    seconds: float
    founding: int
    times_done: int


class PlanRow(msgspec.Struct, frozen=True):
    generation: int
    time: float
    start: str
    base: int
    members: tuple[str, ...]
    shares: tuple[int, ...]


class MetricRecord(msgspec.Struct, frozen=True):
    operation: int
    name: str
    value: float | None
    time: float


class RunReader:
    def __init__(self, folder: Path) -> None:
        self.path = folder / DATABASE
        if not self.path.exists():
            raise JournalError(f"there is no run in {folder}: it has no {DATABASE}; check the folder")
        with self._speaking():
            self._database = self._open()
            try:
                (version,) = self._database.execute("PRAGMA user_version").fetchone()
            except BaseException:
                self._database.close()
                raise
        if version != VERSION:
            self._database.close()
            raise JournalError(wrong_version(self.path, version))

    def _open(self) -> sqlite3.Connection:
        database = self._connect("mode=ro")
        try:
            database.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()
            return database
        except sqlite3.OperationalError:
            # No coordinator, and a folder in which this user may not make the files that readers share.
            database.close()
            if Path(f"{self.path}-wal").exists():
                raise
            return self._connect("immutable=1")

    def _connect(self, how: str) -> sqlite3.Connection:
        address = f"{self.path.absolute().as_uri()}?{how}"
        return sqlite3.connect(address, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)

    # -- what there is -----------------------------------------------------------------------------------------------

    def status(self) -> RunStatus:
        with self._speaking():
            run: dict[str, str] = dict(self._database.execute("SELECT key, value FROM run").fetchall())
            num_steps, num_samples = self._database.execute(
                "SELECT COUNT(*), COALESCE(SUM(count), 0) FROM steps"
            ).fetchone()
        return RunStatus(
            name=run.get("name", ""),
            status=run.get("status", ""),
            reason=run.get("reason", ""),
            started=float(run.get("started", 0)),
            ended=float(run.get("ended", 0)),
            applied=int(run.get("applied", -1)),
            num_steps=num_steps,
            num_samples=num_samples,
            facts={key.removeprefix("fact/"): value for key, value in run.items() if key.startswith("fact/")},
            starting=_starting.decode(run.get(STARTING, "[]")),
        )

    def members(self) -> list[MemberRow]:
        return self._rows(MemberRow, "SELECT * FROM members ORDER BY joined, member")

    def events(self, since_id: int = 0) -> list[EventRow]:
        """Those with a higher id."""
        return self._rows(EventRow, "SELECT * FROM events WHERE id > ? ORDER BY id", since_id)

    def last_event(self, kind: str) -> EventRow | None:
        found = self._rows(EventRow, "SELECT * FROM events WHERE kind = ? ORDER BY id DESC LIMIT 1", kind)
        return found[0] if found else None

    def steps(self, since: int = -1) -> list[StepRecord]:
        """Those of higher operations."""
        return self._rows(StepRecord, "SELECT * FROM steps WHERE operation > ? ORDER BY operation", since)

    def metrics(self, since: int = -1) -> list[MetricRecord]:
        return self._rows(MetricRecord, "SELECT * FROM metrics WHERE operation > ? ORDER BY operation, name", since)

    def plans(self) -> list[PlanRow]:
        with self._speaking():
            rows = self._database.execute("SELECT * FROM plans ORDER BY generation").fetchall()
        names, numbers = msgspec.json.Decoder(tuple[str, ...]), msgspec.json.Decoder(tuple[int, ...])
        return [
            PlanRow(generation, at, start, base, names.decode(members), numbers.decode(shares))
            for generation, at, start, base, members, shares in rows
        ]

    def _rows(self, row_type: type[Row], query: str, *arguments: Any) -> list[Row]:
        with self._speaking():
            return [row_type(*row) for row in self._database.execute(query, arguments).fetchall()]

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> RunReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
