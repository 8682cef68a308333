"""The run's database, `run.db`: what the coordinator must remember, and what people want to see. Only the coordinator
writes it; `RunReader` reads it at the same time.

Two promises, two connections:
- `commit` is for the machine's memory. When it returns, the batch is on disk, all of it (synchronous=FULL: it survives
  also the loss of power). If it fails, it raises `JournalError`, and the coordinator must end: it must not act on what
  it cannot remember.
- `record` is for progress. It survives the death of the process (synchronous=NORMAL); if it fails, the rows can be
  given again.

Both write to one file, one at a time; a later `commit` brings an earlier `record` to the disk with it.

A full disk. Room is taken beforehand, in the database and in its write-ahead log (`RESERVE_BYTES`), so commits go on
for a long time; `record` leaves that room to them. Where it is used up too, `commit` waits for room, and says so
once: the coordinator decides nothing meanwhile, and the training, which does not need it for a step, goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.control.journal.disk import free_bytes, is_want_of_room, words_of
from paceline.control.messages.plan import NOTHING, Plan, PlanStart
from paceline.control.messages.progress import MetricRow, StepRow
from paceline.errors import PacelineError

logger = logging.getLogger("paceline.control")

DATABASE = "run.db"
VERSION = 3
BUSY_S = 10.0  # how long one of the two connections waits for the other
RESERVE_BYTES = 1 << 20
CHECKPOINT_PAGES = 200  # of the write-ahead log, so that it stays within what was taken
FULL_S = 600.0  # how long a commit waits for room
_LOOK_AGAIN_S = 0.25
_RESERVE_KEY = "reserve"

SCHEMA = """
CREATE TABLE remembered(key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE events(id INTEGER PRIMARY KEY AUTOINCREMENT, time REAL, term INTEGER, kind TEXT, member TEXT, text TEXT);
CREATE TABLE plans(generation INTEGER PRIMARY KEY, time REAL, start TEXT, base INTEGER, members TEXT, shares TEXT);
CREATE TABLE members(
    member TEXT PRIMARY KEY, agent TEXT, pid INTEGER, host TEXT, rank INTEGER, share INTEGER, phase TEXT, fate TEXT,
    reason TEXT, generation INTEGER, applied INTEGER, samples_per_s REAL, step_s REAL, starved REAL,
    role TEXT, ranges INTEGER, backups INTEGER, arriving INTEGER, num_keys INTEGER, num_bytes INTEGER, busy REAL,
    staleness TEXT, joined REAL, updated REAL);
CREATE TABLE steps(
    operation INTEGER PRIMARY KEY, time REAL, generation INTEGER, epoch INTEGER, position INTEGER, count INTEGER,
    loss REAL, seconds REAL, founding INTEGER, times_done INTEGER);
CREATE TABLE metrics(operation INTEGER, name TEXT, value REAL, time REAL, PRIMARY KEY(operation, name));
CREATE TABLE run(key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
"""

# A row of the same founding may come twice, from two main workers; only a later founding does an operation again.
_STEP = """
INSERT INTO steps VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, 1)
ON CONFLICT(operation) DO UPDATE SET
    time = CASE WHEN excluded.founding > founding THEN excluded.time ELSE time END,
    generation = excluded.generation, epoch = excluded.epoch, position = excluded.position,
    count = excluded.count, loss = excluded.loss, seconds = excluded.seconds, founding = excluded.founding,
    times_done = times_done + (excluded.founding > founding)
WHERE excluded.founding >= founding
"""

_ADOPTED = """
INSERT INTO steps VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, 1)
ON CONFLICT(operation) DO UPDATE SET founding = excluded.founding WHERE excluded.founding > founding
"""

_EVENT = "INSERT INTO events(time, term, kind, member, text) VALUES(?, ?, ?, ?, ?)"

_MEMBER = """
INSERT INTO members VALUES(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT(member) DO UPDATE SET
    host = excluded.host, rank = excluded.rank, share = excluded.share, phase = excluded.phase, fate = excluded.fate,
    reason = excluded.reason, generation = excluded.generation, applied = excluded.applied,
    samples_per_s = excluded.samples_per_s, step_s = excluded.step_s, starved = excluded.starved,
    ranges = excluded.ranges, backups = excluded.backups, arriving = excluded.arriving,
    num_keys = excluded.num_keys, num_bytes = excluded.num_bytes, busy = excluded.busy,
    staleness = excluded.staleness, updated = excluded.updated
"""


class JournalError(PacelineError):
    """The run's database cannot be read or written."""


class MemberRow(msgspec.Struct, frozen=True):
    """A member, a worker or a server by its `role`, as the coordinator sees it. Where it is read it also has the times
    when it `joined` and was `updated`.

    Of a server: how many ranges it is primary of, of how many it is a backup, how many are on their way to it, the
    keys and bytes it holds (copies included), which part of the time it is busy, and how stale pushes were (as in
    `Serving`, by comma)."""

    member: str
    agent: str
    pid: int
    host: str
    rank: int
    share: int
    phase: str
    fate: str
    reason: str
    generation: int
    applied: int
    samples_per_s: float = 0.0
    step_s: float = 0.0
    starved: float = 0.0
    role: str = "worker"
    ranges: int = 0
    backups: int = 0
    arriving: int = 0
    num_keys: int = 0
    num_bytes: int = 0
    busy: float = 0.0
    staleness: str = ""
    joined: float = 0.0
    updated: float = 0.0

    @property
    def is_server(self) -> bool:
        return self.role == "server"


class Happening(NamedTuple):
    """A line of the run's log."""

    term: int
    kind: str
    member: str
    text: str


class Journal:
    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = folder / DATABASE
        self._clock = clock
        self._commit_lock, self._record_lock = threading.Lock(), threading.Lock()
        self._hurry = threading.Event()
        with self._speaking("opened"):
            # Made here, so that only this user can read what it holds; SQLite gives its other files the same mode.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._memory = _connect(self.path, "FULL")
            try:
                _prepare(self._memory, self.path)
                _reserve(self._memory, folder)
                self._progress = _connect(self.path, "NORMAL")
                self._foundings = dict(
                    self._memory.execute(
                        "SELECT generation, base FROM plans WHERE start = ? ORDER BY generation",
                        (PlanStart.FOUND.value,),
                    )
                )
            except BaseException:
                self._memory.close()
                raise

    # -- the machine's memory ----------------------------------------------------------------------------------------

    def remembered(self) -> dict[str, bytes]:
        with self._speaking("read"), self._commit_lock:
            return dict(self._memory.execute("SELECT key, value FROM remembered WHERE key <> ?", (_RESERVE_KEY,)))

    def commit(
        self,
        changes: Mapping[str, bytes | None],
        happenings: Iterable[Happening] = (),
        plans: Iterable[Plan] = (),
        members: Iterable[MemberRow] = (),
    ) -> None:
        """All of it is on disk when this returns. A value of None forgets its key. Waits for room on a full disk."""
        now, plans = self._clock(), list(plans)
        happenings, members = list(happenings), list(members)
        self.patiently(lambda: self._try_commit(changes, happenings, plans, members, now))
        with self._record_lock:
            self._foundings.update({plan.generation: plan.base for plan in plans if plan.start is PlanStart.FOUND})

    def patiently(self, write: Callable[[], None]) -> None:
        """Write what must be written, again and again while the disk is full."""
        ends_at = time.monotonic() + FULL_S
        is_told = False
        while True:
            try:
                write()
                break
            except JournalError as error:
                is_over = time.monotonic() > ends_at or self._hurry.is_set()
                if is_over or not is_want_of_room(error, self.path):
                    raise
                if not is_told:
                    is_told = True
                    logger.error("%s; nothing is decided until there is room, the training goes on", error)
                self._hurry.wait(_LOOK_AGAIN_S)
        if is_told:
            logger.warning("%s can be written again", self.path)

    def stop_waiting(self) -> None:
        """For room: from now on a full disk is an error. May be called by a signal handler."""
        self._hurry.set()

    def _try_commit(
        self,
        changes: Mapping[str, bytes | None],
        happenings: list[Happening],
        plans: list[Plan],
        members: list[MemberRow],
        now: float,
    ) -> None:
        with self._speaking("written"), self._commit_lock, _transaction(self._memory) as database:
            for key, value in changes.items():
                if value is None:
                    database.execute("DELETE FROM remembered WHERE key = ?", (key,))
                else:
                    database.execute("INSERT OR REPLACE INTO remembered VALUES(?, ?)", (key, value))
            database.executemany(_EVENT, [(now, *happening) for happening in happenings])
            database.executemany("INSERT OR REPLACE INTO plans VALUES(?, ?, ?, ?, ?, ?)", [_row(p, now) for p in plans])
            database.executemany(_MEMBER, [_timed(member, now) for member in members])

    # -- progress ----------------------------------------------------------------------------------------------------

    def record(
        self,
        steps: Iterable[StepRow] = (),
        metrics: Iterable[MetricRow] = (),
        members: Iterable[MemberRow] = (),
        run: Mapping[str, str] | None = None,
        happenings: Iterable[Happening] = (),
        *,
        needed: bool = False,
    ) -> None:
        """`needed` may use the room that is reserved; all else is refused while the disk is full."""
        now = self._clock()
        if not needed and (free := free_bytes(self.path)) is not None and free < RESERVE_BYTES // 4:
            raise JournalError(
                f"{self.path} takes only what must be remembered: {free:,} bytes are free there; make room"
            )
        with self._speaking("written"), self._record_lock, _transaction(self._progress) as database:
            database.executemany(_STEP, self._values_of(steps))
            database.executemany(
                "INSERT OR REPLACE INTO metrics VALUES(?, ?, ?, ?)",
                [(row.operation, row.name, row.value, now) for row in metrics],
            )
            database.executemany(_MEMBER, [_timed(member, now) for member in members])
            database.executemany("INSERT OR REPLACE INTO run VALUES(?, ?)", (run or {}).items())
            database.executemany(_EVENT, [(now, *happening) for happening in happenings])

    def adopt(self, rows: Iterable[StepRow]) -> None:
        """A founding began with these. What is known of them otherwise stays; of those that were never recorded it is
        not known how they went."""
        with self._speaking("written"), self._record_lock, _transaction(self._progress) as database:
            database.executemany(_ADOPTED, self._values_of(rows))

    def _values_of(self, rows: Iterable[StepRow]) -> list[tuple[object, ...]]:
        now = self._clock()
        return [
            (operation, at or now, generation, *rest, self._founding_of(generation))
            for operation, generation, *rest, at in map(msgspec.structs.astuple, rows)
        ]

    def own(self, rows: Iterable[StepRow]) -> list[StepRow]:
        """The rows of steps that were made in this run. A run that began with the checkpoint of another one gets what
        that one had not recorded: a founding makes no steps up to its base."""
        with self._record_lock:
            return [
                row for row in rows if row.operation > self._foundings.get(self._founding_of(row.generation), NOTHING)
            ]

    def reached(self) -> tuple[int, int, int]:
        """The generation of the newest founding, and the highest operations of a step and of a metric that are
        recorded in it."""
        with self._speaking("read"), self._record_lock:
            if not self._foundings:
                return 0, NOTHING, NOTHING
            founding, base = max(self._foundings.items())
            (step,) = self._progress.execute(
                "SELECT MAX(operation) FROM steps WHERE founding = ?", (founding,)
            ).fetchone()
            (metric,) = self._progress.execute("SELECT MAX(operation) FROM metrics").fetchone()
            reached = base if step is None else max(base, step)
            return founding, reached, NOTHING if metric is None else min(metric, reached + 1)

    def _founding_of(self, generation: int) -> int:
        foundings = sorted(self._foundings)
        at = bisect_right(foundings, generation)
        return foundings[at - 1] if at else 0

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with self._commit_lock, self._record_lock:
            self._progress.close()
            self._memory.close()

    @contextlib.contextmanager
    def _speaking(self, verb: str) -> Iterator[None]:
        """Errors of SQLite and of the disk, as errors that say what to do."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            free = free_bytes(self.path) or 0
            raise JournalError(
                f"{self.path} cannot be {verb}: {error} ({free:,} bytes are free there); is its disk full, read-only "
                "or broken? Make room; a run that ended goes on with --resume from what was remembered. A database "
                "that is damaged may be moved away: --resume then goes on from the newest checkpoint, without history"
            ) from error


def _connect(path: Path, synchronous: str) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    database.execute(f"PRAGMA synchronous = {synchronous}")
    database.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
    return database


def _reserve(database: sqlite3.Connection, folder: Path) -> None:
    """Have room for later, in the database and in its log: pages that were written and are free again. Not where there
    is little."""
    (num_pages,), (size,) = (database.execute(f"PRAGMA {name}").fetchone() for name in ("freelist_count", "page_size"))
    free = free_bytes(folder)
    if num_pages * size >= RESERVE_BYTES // 2 or free is None or free < 4 * RESERVE_BYTES:
        return
    try:
        with _transaction(database):
            blob = (_RESERVE_KEY, RESERVE_BYTES)
            database.execute("INSERT OR REPLACE INTO remembered VALUES(?, zeroblob(?))", blob)
        database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        with _transaction(database):
            database.execute("DELETE FROM remembered WHERE key = ?", (_RESERVE_KEY,))
    except sqlite3.OperationalError as error:
        logger.warning("%s", words_of(folder, error))


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version == 0:
        database.execute("PRAGMA journal_mode = WAL")
        with _transaction(database):
            for statement in filter(str.strip, SCHEMA.split(";")):
                database.execute(statement)
            database.execute(f"PRAGMA user_version = {VERSION}")
    elif version != VERSION:
        raise JournalError(wrong_version(path, version))


def wrong_version(path: Path, version: int) -> str:
    if version == 0:
        return f"{path} is just being made; try again in a moment"
    return (
        f"{path} has version {version} of the schema, this Paceline reads and writes version {VERSION}; "
        "use the Paceline that made it, or another folder"
    )


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """All or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield database
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # a full disk has rolled back already
            database.execute("ROLLBACK")
        raise


def _row(plan: Plan, now: float) -> tuple[object, ...]:
    members = msgspec.json.encode(plan.members).decode()
    shares = msgspec.json.encode([seat.share for seat in plan.seats]).decode()
    return plan.generation, now, plan.start.value, plan.base, members, shares


def _timed(member: MemberRow, now: float) -> tuple[object, ...]:
    """With the time as that of its joining, which counts the first time only, and as that of its update."""
    return (*msgspec.structs.astuple(member)[:-2], now, now)
