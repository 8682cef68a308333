"""The side of a worker on another host: its way to the checkpoints in the run's folder.

    held = depot.hold(files, step, operation, between)   its files are at the run's host, without a name yet
    held.publish()                                       its step counts: it gets its name
    depot.operations()                                   which checkpoints are there, newest first
    depot.fetch(operation, into)                         a copy of one

A connection that breaks is made again, and what was under way is begun again, for as long as `RETRY_S` after the last
byte that moved: a coordinator that died is back by then. Whatever the custodian refuses is a `CustodyError` at once.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.custody import moving, names
from paceline.custody.custodian import Publication, Shared, Tidying
from paceline.custody.moving import CustodyError, Unreached
from paceline.custody.partial import Partial
from paceline.errors import CallFailed, WireError
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline

RETRY_S = 60.0
CALL_S = 30.0
LOOK_S = 5.0
PAUSE_S = 0.5
SLICE_S = 0.05

Connect = Callable[[Deadline], Connection]
Between = Callable[[], None]
Answer = TypeVar("Answer")


class Files(Protocol):
    """The files of a checkpoint, here. Called by the thread that sends them; may be read more than once, also after
    they are at the run's host if they are lasting."""

    is_lasting: bool

    def sizes(self) -> dict[str, int]: ...

    def pieces(self, name: str) -> Iterator[memoryview]: ...


class OnDisk:
    """They must stay where they are until they are published."""

    is_lasting = True

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[str, int]:
        return {name: (self._folder / name).stat().st_size for name in names.FILES}

    def pieces(self, name: str) -> Iterator[memoryview]:
        with (self._folder / name).open("rb", buffering=0) as file:
            yield from moving.read_pieces(file.fileno())


class Depot:
    """`connect` dials the custodian. Any thread; calls share one connection, a checkpoint that is sent has its own."""

    def __init__(self, connect: Connect, *, retry_s: float = RETRY_S) -> None:
        self._connect = connect
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def connect(self, what: str) -> Connection:
        return self._connect(Deadline(CALL_S, what))

    # -- small questions ---------------------------------------------------------------------------------------------

    def ask(self, operation: str, arguments: Any, answer_type: type[Answer], *, within_s: float = RETRY_S) -> Answer:
        """Ask until there is an answer; `Unreached` after `retry_s`, or less."""
        return self.persist(lambda: self.ask_once(operation, arguments, answer_type), operation, within_s=within_s)

    def ask_once(self, operation: str, arguments: Any, answer_type: type[Answer], seconds: float = CALL_S) -> Answer:
        """Ask, and raise whatever the connection raises: for who asks again soon."""
        deadline = Deadline(seconds, f"asking the run's host ({operation})")
        with self._lock:
            if self._connection is None:
                self._connection = self._connect(deadline)
            try:
                return calls.call(self._connection, operation, arguments, answer_type=answer_type, deadline=deadline)
            except WireError:
                self._connection.close()
                self._connection = None
                raise

    def persist(
        self,
        attempt: Callable[[], Answer],
        what: str,
        between: Between = moving.nothing,
        *,
        within_s: float = RETRY_S,
    ) -> Answer:
        """Try again while the run's host cannot be reached. An attempt that moves bytes counts from its last one."""
        retry_s = min(self._retry_s, within_s)
        moved_at = time.monotonic()
        while True:
            try:
                return attempt()
            except CallFailed as error:
                raise CustodyError(str(error)) from error
            except Stalled as error:
                moved_at = max(moved_at, error.moved_at)
                problem: Exception = error
            except WireError as error:
                problem = error
            if time.monotonic() - moved_at > retry_s:
                raise Unreached(f"{what}: the run's host was not reached for {retry_s:g} s ({problem})") from problem
            until = time.monotonic() + PAUSE_S
            while time.monotonic() < until:
                between()
                time.sleep(SLICE_S)

    def operations(self, *, within_s: float = RETRY_S) -> list[int]:
        found: list[int] = self.ask("list", None, list[int], within_s=within_s)
        return found

    def operations_now(self, otherwise: list[int]) -> list[int]:
        """The same, asked once: for who asks again soon."""
        try:
            found: list[int] = self.ask_once("list", None, list[int], LOOK_S)
            return found
        except (WireError, CallFailed):
            return otherwise

    def tidy(self, asked: Tidying) -> list[str]:
        """Asked once: what is too many now is so after the next checkpoint too, and who halts must not wait for it."""
        try:
            removed: list[str] = self.ask_once("tidy", asked, list[str])
        except (WireError, CallFailed) as error:
            raise CustodyError(f"tidy: {error}") from error
        return removed

    def set_aside(self, operations: Sequence[int]) -> list[str]:
        moved: list[str] = self.ask("aside", list(operations), list[str])
        return moved

    def shares(self, folder: Path) -> bool:
        """Whether this folder is the same one at the run's host; it must be writable here."""
        mark, name = secrets.token_hex(16), f".paceline-mark-{secrets.token_hex(8)}"
        path = folder / name
        path.write_text(mark)
        try:
            return self.ask("shares", Shared(str(folder.resolve()), name, mark), bool)
        finally:
            path.unlink(missing_ok=True)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def hold(self, files: Files, step: int, operation: int, between: Between) -> Held:
        """Bring these files to the run's host."""
        held = Held(self, files, step, operation)
        held.bring(between)
        return held

    def fetch(self, operation: int, into: Partial, between: Between = moving.nothing) -> None:
        """Have the files of a checkpoint here; what is in them is for the reader to judge."""

        def attempt() -> None:
            connection = self.connect(f"fetching the checkpoint of operation {operation}")
            try:
                deadline = Deadline(CALL_S, "opening a checkpoint")
                sizes = calls.call(connection, "open", operation, answer_type=dict[str, int], deadline=deadline)
                _receive_files(connection, sizes, into)
            finally:
                connection.close()

        self.persist(attempt, f"the checkpoint of operation {operation}", between)

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
                self._connection = None


class Held:
    """A checkpoint at the run's host that has no name yet. It is there as long as its connection is; if that breaks, it
    is brought again when it is published, if its files last that long."""

    def __init__(self, depot: Depot, files: Files, step: int, operation: int) -> None:
        self._depot = depot
        self._files = files
        self._step = step
        self._operation = operation
        self._connection: Connection | None = None
        self._checksums: dict[str, str] = {}

    def bring(self, between: Between) -> None:
        self._depot.persist(lambda: self._bring(between), self._what, between)

    def publish(self, between: Between = moving.nothing) -> None:
        def attempt() -> None:
            if self._connection is None and not self._files.is_lasting:
                raise CustodyError(
                    f"{self._what}: the connection to the run's host broke, and there was no room to keep a copy here; "
                    "the next one is sent anew"
                )
            if self._connection is None:
                self._bring(between)
            assert self._connection is not None
            try:
                asked = Publication(self._step, self._operation, self._checksums)
                deadline = Deadline(CALL_S, f"publishing {self._what}")
                calls.call(self._connection, "publish", asked, answer_type=type(None), deadline=deadline)
            except WireError:
                self.close()
                raise

        self._depot.persist(attempt, self._what, between)
        self.close()

    @property
    def _what(self) -> str:
        return f"the checkpoint of operation {self._operation}"

    def _bring(self, between: Between) -> None:
        self.close()
        sizes = self._files.sizes()
        connection = self._depot.connect(f"bringing {self._what} to the run's host")
        moved_at = 0.0
        try:
            announcing = Deadline(CALL_S, f"announcing {self._what}")
            calls.call(connection, "hold", sizes, answer_type=type(None), deadline=announcing)
            calls.send_call(connection, "fill", deadline=Deadline(CALL_S, f"sending {self._what}"))

            def step() -> None:
                nonlocal moved_at
                moved_at = time.monotonic()
                between()

            for name, num_bytes in sizes.items():
                pieces = self._files.pieces(name)
                self._checksums[name] = moving.send_pieces(connection, pieces, num_bytes, name, step)
            header, _ = connection.receive(deadline=Deadline(CALL_S, f"the run's host to have {self._what}"))
            if header.kind != "return":
                raise CustodyError(f"{self._what}: {header.read_body(str)}")
        except WireError as error:
            connection.close()
            raise Stalled(str(error), moved_at) from error
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Stalled(WireError):
    """The sending broke off; `moved_at` is when a byte moved last."""

    def __init__(self, message: str, moved_at: float) -> None:
        super().__init__(message)
        self.moved_at = moved_at


def _receive_files(connection: Connection, sizes: dict[str, int], into: Partial) -> None:
    if sorted(sizes) != sorted(names.FILES):
        raise CustodyError(f"the run's host offers {sorted(sizes)}, which is no checkpoint")
    calls.send_call(connection, "bytes", deadline=Deadline(CALL_S, "asking for a checkpoint"))
    checksums = {}
    for name, num_bytes in sizes.items():
        (into.path / name).unlink(missing_ok=True)  # of an attempt before
        fd = into.create(name)
        try:
            checksums[name] = moving.receive(connection, fd.fileno(), num_bytes, name)
        except OSError as error:
            if isinstance(error, WireError):
                raise
            raise CustodyError(f"{name} cannot be written in {into.path.parent}: {error.strerror or error}") from error
        finally:
            fd.close()
    header, _ = connection.receive(deadline=Deadline(CALL_S, "the checksums of a checkpoint"))
    if header.kind != "return" or header.read_body(dict[str, str]) != checksums:
        raise CustodyError("the checkpoint was changed on its way from the run's host: checksums differ")
