"""The side of the run's host: takes checkpoints and logs of other hosts into its folder, and gives checkpoints out.

Served to each visitor on a connection and a thread of its own (`wire.calls`):

    hold(files)              announce the files of a checkpoint, with their sizes; refused where there is no room
    fill, then the bytes     receive them into a partial folder; returns their checksums
    publish(operation, ...)  compare the checksums and give it its name
    tidy(...)                keep what is to be kept
    list                     the operations of the checkpoints that are here, newest first
    open(operation)          the sizes of the files of one, which this visitor can read from now on
    bytes                    send them, and then their checksums
    aside(operations)        those cannot be read, or are of a history that goes on no more
    append(log, offset, ..)  more of a log; returns how much of it is here
    shares(folder, ...)      whether a folder of the visitor is the same as that of this name here

Invariants
- No path is taken from a visitor but the one of `shares`, of which it learns only whether its own mark is there.
- What a visitor has not published is gone when its connection is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from paceline.custody import moving, names
from paceline.custody.moving import CustodyError
from paceline.custody.partial import Partial, free_bytes, sweep
from paceline.custody.shelf import RetentionRules, Shelf
from paceline.errors import WireError
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.descriptors import Fd, creating
from paceline.wire.handshake import Visitor

logger = logging.getLogger("paceline.custody")

IDLE_S = 3600.0  # between a checkpoint that is written and the word that its step counts lies a step, however long
LOG_IDLE_S = 60.0
ANSWER_S = 30.0
MAX_DRAFTS = 4
MAX_FILE_BYTES = 1 << 44
MAX_LOG_PIECE = 1 << 18
MARK = re.compile(r"\.paceline-mark-[0-9a-f]{16}")
JOINED_LOGS = "joined"  # in the folder of logs: a folder for each agent of another host
_AGENT_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LOG_NAME = re.compile(r"[a-z][a-z0-9]{0,19}\.(log|json)")


class Publication(msgspec.Struct, frozen=True):
    step: int
    operation: int
    checksums: dict[str, str]


class Tidying(msgspec.Struct, frozen=True):
    keep_last: int
    keep_best: int
    scores: dict[int, float]
    published: int | None


class LogPiece(msgspec.Struct, frozen=True):
    """The bytes of a log from `offset` on; with `replaces`, a small file as a whole."""

    folder: str
    name: str
    offset: int
    data: bytes
    replaces: bool = False


class Shared(msgspec.Struct, frozen=True):
    """A mark that the asker has just written into its folder."""

    folder: str
    name: str
    mark: str


class Custodian:
    """`may_store(visitor)` says why a visitor may not bring checkpoints; empty if it may."""

    def __init__(self, folder: Path, may_store: Callable[[Visitor], str]) -> None:
        self._checkpoints = folder / names.FOLDER
        self._logs = folder / "logs" / JOINED_LOGS
        self._may_store = may_store
        self._lock = threading.Lock()  # publications and tidying, one at a time
        self._drafts = threading.BoundedSemaphore(MAX_DRAFTS)

    def serve(self, connection: Connection, visitor: Visitor) -> None:
        """Answer a visitor until it goes."""
        visit = _Visit(self, connection, visitor)
        idle_s = LOG_IDLE_S if visitor.role == "agent" else IDLE_S
        try:
            calls.serve(connection, visit.handlers(), idle_s=idle_s, answer_s=ANSWER_S)
        finally:
            visit.close()

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def draft(self, visitor: Visitor, needed_bytes: int) -> Partial:
        """A folder to receive a checkpoint in; to be given back."""
        if problem := self._may_store(visitor):
            raise CustodyError(problem)
        self._checkpoints.mkdir(parents=True, exist_ok=True)
        if needed_bytes > (room_bytes := free_bytes(self._checkpoints)):
            raise CustodyError(
                f"no room for a checkpoint in {self._checkpoints} of the run's host: it needs {needed_bytes:,} bytes "
                f"and {room_bytes:,} are free; make room there, or keep fewer checkpoints"
            )
        if not self._drafts.acquire(blocking=False):
            raise CustodyError(
                f"{MAX_DRAFTS} checkpoints are being received at the run's host already; try again later"
            )
        try:
            sweep(self._checkpoints)
            return Partial(self._checkpoints)
        except BaseException:
            self._drafts.release()
            raise

    def give_back(self, draft: Partial | None, *, published: bool) -> None:
        if draft is not None:
            self._drafts.release()
            if not published:
                draft.remove()

    def publish(self, visitor: Visitor, draft: Partial, step: int, operation: int) -> None:
        if problem := self._may_store(visitor):
            raise CustodyError(problem)
        with self._lock:
            names.publish(draft, self._checkpoints, step, operation)
        logger.info("keeps the checkpoint of operation %d from %s", operation, visitor.member)

    def tidy(self, asked: Tidying) -> list[str]:
        rules = RetentionRules(asked.keep_last, asked.keep_best)
        rules.check()
        with self._lock:
            return [str(path) for path in Shelf(self._checkpoints, rules).tidy(asked.scores, published=asked.published)]

    def operations(self) -> list[int]:
        return [found.operation for found in names.find(self._checkpoints)]

    def open(self, operation: int) -> dict[str, Fd]:
        opened: dict[str, Fd] = {}
        try:
            path = names.find_one(self._checkpoints, operation)
            for name in names.FILES:
                with creating:
                    opened[name] = Fd(os.open(path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
        except OSError as error:
            for fd in opened.values():
                fd.close()
            raise CustodyError(f"the checkpoint of operation {operation} cannot be opened: {error}") from error
        return opened

    def aside(self, operations: Sequence[int]) -> list[str]:
        with self._lock:
            moved = []
            for operation in operations:
                with contextlib.suppress(FileNotFoundError):
                    moved.append(names.set_aside(names.find_one(self._checkpoints, operation)).name)
            return moved

    # -- logs --------------------------------------------------------------------------------------------------------

    def append(self, piece: LogPiece) -> int:
        """How many bytes of this log are here now. Bytes that do not follow those are not taken."""
        if not (_AGENT_FOLDER.fullmatch(piece.folder) and _LOG_NAME.fullmatch(piece.name)):
            raise CustodyError(f"{piece.folder}/{piece.name} is no name of a log")
        folder = self._logs / piece.folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / piece.name
        if piece.replaces:
            draft = folder / f".{piece.name}"
            draft.write_bytes(piece.data)
            draft.replace(path)
            return len(piece.data)
        with creating:
            log = Fd(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        try:
            size = os.fstat(log.fileno()).st_size
            if size == piece.offset:
                size += os.write(log.fileno(), piece.data) if piece.data else 0
            return size
        finally:
            log.close()


class _Visit:
    """One visitor, and what it has under way."""

    def __init__(self, custodian: Custodian, connection: Connection, visitor: Visitor) -> None:
        self._custodian = custodian
        self._connection = connection
        self._visitor = visitor
        self._draft: Partial | None = None
        self._sizes: dict[str, int] = {}
        self._checksums: dict[str, str] = {}
        self._opened: dict[str, Fd] = {}

    def handlers(self) -> dict[str, calls.Handler]:
        logs: dict[str, calls.Handler] = {"append": self._append}
        if self._visitor.role == "agent":
            return logs
        return {
            **logs,
            "hold": self._hold,
            "fill": self._fill,
            "publish": self._publish,
            "tidy": self._tidy,
            "list": self._list,
            "open": self._open,
            "bytes": self._bytes,
            "aside": self._aside,
            "shares": self._shares,
        }

    def close(self) -> None:
        self._drop(published=False)
        for fd in self._opened.values():
            fd.close()

    def _drop(self, *, published: bool) -> None:
        draft, self._draft = self._draft, None
        self._custodian.give_back(draft, published=published)

    def _hold(self, request: calls.CallBody) -> object:
        sizes: dict[str, int] = request.read(dict[str, int])
        if sorted(sizes) != sorted(names.FILES) or not all(0 < size <= MAX_FILE_BYTES for size in sizes.values()):
            raise CustodyError(f"{sizes} are not the files of a checkpoint")
        self._drop(published=False)
        self._draft = self._custodian.draft(self._visitor, sum(sizes.values()))
        self._sizes, self._checksums = sizes, {}
        return None

    def _fill(self, _: calls.CallBody) -> object:
        if self._draft is None:
            self._connection.close()  # bytes follow that nobody has asked for
            raise CustodyError("no checkpoint was announced")
        problem: OSError | None = None
        for name, num_bytes in self._sizes.items():
            fd = self._draft.create(name)
            try:
                self._checksums[name] = moving.receive(self._connection, fd.fileno(), num_bytes, name)
                os.fsync(fd.fileno())
            except OSError as error:
                if isinstance(error, WireError):  # in the middle of the bytes
                    self._connection.close()
                    raise
                problem = problem or error
            except WireError:
                self._connection.close()
                raise
            finally:
                fd.close()
        if problem is not None:
            self._drop(published=False)
            raise CustodyError(f"the run's host cannot write the checkpoint: {problem.strerror or problem}")
        return self._checksums

    def _publish(self, request: calls.CallBody) -> object:
        asked: Publication = request.read(Publication)
        if self._draft is None or not names.is_possible(asked.step, asked.operation):
            raise CustodyError(f"there is no checkpoint of operation {asked.operation} to publish")
        if asked.checksums != self._checksums:
            self._drop(published=False)
            raise CustodyError(
                f"the checkpoint of operation {asked.operation} was changed on its way: checksums differ"
            )
        self._custodian.publish(self._visitor, self._draft, asked.step, asked.operation)
        self._drop(published=True)
        return None

    def _tidy(self, request: calls.CallBody) -> object:
        return self._custodian.tidy(request.read(Tidying))

    def _list(self, _: calls.CallBody) -> object:
        return self._custodian.operations()

    def _open(self, request: calls.CallBody) -> object:
        for fd in self._opened.values():
            fd.close()
        self._opened = self._custodian.open(request.read(int))
        return {name: os.fstat(fd.fileno()).st_size for name, fd in self._opened.items()}

    def _bytes(self, _: calls.CallBody) -> object:
        checksums = {}
        try:
            for name, fd in self._opened.items():
                os.lseek(fd.fileno(), 0, os.SEEK_SET)
                num_bytes = os.fstat(fd.fileno()).st_size
                checksums[name] = moving.send(self._connection, fd.fileno(), num_bytes, name)
        except BaseException:
            self._connection.close()  # the visitor takes whatever comes next for bytes of a file
            raise
        return checksums

    def _aside(self, request: calls.CallBody) -> object:
        return self._custodian.aside(request.read(list[int]))

    def _append(self, request: calls.CallBody) -> object:
        return self._custodian.append(request.read(LogPiece))

    def _shares(self, request: calls.CallBody) -> object:
        asked: Shared = request.read(Shared)
        if not MARK.fullmatch(asked.name):
            raise CustodyError(f"{asked.name!r} is no name of a mark")
        try:
            with creating:
                fd = Fd(
                    os.open(Path(asked.folder) / asked.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
                )
            try:
                return os.read(fd.fileno(), 64) == asked.mark.encode()
            finally:
                fd.close()
        except (OSError, ValueError):
            return False
