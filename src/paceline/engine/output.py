"""What workers print: into their logs at once, and line by line, with a prefix, to whoever looks on.

One thread reads the pipes of all workers and writes their lines to the logs. For people they go to a second thread
through a bounded queue, so a terminal that stands still (Ctrl-S, a full pipe) holds up no worker: what
does not fit is left out there, with a note, and is in the log all the same.

A line that has not ended is shown when its stream ends or it has grown past `LONGEST_LINE`. Of a line that a carriage
return has overwritten, as progress bars do, the last version is shown.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from paceline.control.journal.disk import Cosmetic
from paceline.control.shell.line import Bell
from paceline.wire.descriptors import Fd, creating

LONGEST_LINE = 1 << 16
CHUNK_BYTES = 1 << 16
QUEUED_LINES = 10_000
KEPT_LINES = 300
CLOSING_S = 5.0

Show = Callable[[str, bool, str], None]  # label, whether it is an error stream, line


class Splitter:
    """Bytes into lines of text."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        *lines, rest = (self._rest + data).split(b"\n")
        overwritten, _, newest = rest.rpartition(b"\r")
        # A return at the very end overwrites nothing yet: what comes next may be the end of the line.
        self._rest = newest if newest else rest if len(overwritten) < LONGEST_LINE else b""
        if len(self._rest) >= LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [_text(line) for line in lines]

    def flush(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_text(rest)] if rest else []


def _text(line: bytes) -> str:
    line = line.rstrip(b"\r").rpartition(b"\r")[2]
    return line.decode(errors="replace")


class Printed:
    """What one process has printed; made by `Output.open`. A full disk is no reason to stop the training: lines that it
    does not take are counted, and where the log goes on it says how many are missing."""

    def __init__(self, label: str, log: Path, say: Callable[[str], None]) -> None:
        self.label = label
        self._log: Fd | None = None
        self._disk = Cosmetic(log, f"the lines of {label} in its log", say)
        self._num_lost = 0
        self._open()
        self.all_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.error_lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.is_complete = threading.Event()

    def _open(self) -> bool:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        try:
            with creating:
                self._log = Fd(os.open(self._disk.path, flags, 0o600))
        except OSError as error:
            self._disk.failed(error)
        return self._log is not None

    def write(self, data: bytes) -> None:
        """To the log only."""
        if self._log is None and not self._open():
            self._num_lost += data.count(b"\n")
            return
        assert self._log is not None
        try:
            if self._num_lost:
                os.write(self._log.fileno(), f"--- {self._num_lost} lines are missing here ---\n".encode())
                self._num_lost = 0
            while data:
                data = data[os.write(self._log.fileno(), data) :]
        except OSError as error:
            self._num_lost += data.count(b"\n")
            self._disk.failed(error)
            return
        self._disk.worked()

    def complete(self) -> None:
        if self._log is not None:
            self._log.close()
        self.is_complete.set()


class _Stream:
    def __init__(self, descriptor: Fd, printed: Printed, is_error: bool) -> None:
        self.descriptor = descriptor
        self.printed = printed
        self.is_error = is_error
        self.splitter = Splitter()


class Pipes(NamedTuple):
    """The ends to give to a process, and to close here when it has started."""

    out: int
    error: int
    printed: Printed


class Output:
    """`show` is called on the second thread, one line at a time."""

    def __init__(self, show: Show) -> None:
        self._show = show
        self._bell = Bell()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell.fileno(), selectors.EVENT_READ)
        self._orders: deque[Callable[[], None]] = deque()
        self._closing = False
        self._lines: queue.Queue[tuple[str, bool, str] | None] = queue.Queue(QUEUED_LINES)
        self._num_left_out = 0
        self._reader = threading.Thread(target=self._read_all, name="paceline-output", daemon=True)
        self._printer = threading.Thread(target=self._print_all, name="paceline-printer", daemon=True)
        self._reader.start()
        self._printer.start()

    # -- the agent's side --------------------------------------------------------------------------------------------

    def open(self, label: str, log: Path) -> Pipes:
        """Pipes for a process whose lines are to be shown under this label and appended to this file."""
        with creating:
            printed = Printed(label, log, self.say)
            out, error = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
            streams = [_Stream(Fd(out[0]), printed, False), _Stream(Fd(error[0]), printed, True)]
        for stream in streams:
            os.set_blocking(stream.descriptor.fileno(), False)
        self._order(lambda: self._register(streams))
        return Pipes(out[1], error[1], printed)

    def finish(self, printed: Printed) -> None:
        """The process is gone: read what is left, whoever may still hold the pipe, and end its log."""
        self._order(lambda: self._end_streams(printed))
        printed.is_complete.wait(CLOSING_S)

    def say(self, text: str) -> None:
        """A line of the agent's own."""
        self._put("", True, text)

    def close(self) -> None:
        """Show what is to be shown, but wait no longer than `CLOSING_S` for a terminal that does not take it."""
        self._closing = True
        self._bell.ring()
        self._reader.join()
        self._bell.close()
        with contextlib.suppress(queue.Full):
            if self._num_left_out:
                self._lines.put(self._note_left_out(), timeout=CLOSING_S)
            self._lines.put(None, timeout=CLOSING_S)
            self._printer.join(CLOSING_S)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.append(order)
        self._bell.ring()

    # -- the thread that reads ---------------------------------------------------------------------------------------

    def _read_all(self) -> None:
        while not (self._closing and not self._orders):
            for key, _ in self._selector.select():
                if key.data is None:
                    self._bell.silence()
                elif key.data.descriptor.number >= 0:
                    self._read(key.data)
            while self._orders:
                self._orders.popleft()()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._end_streams(key.data.printed)
        self._selector.close()

    def _register(self, streams: list[_Stream]) -> None:
        for stream in streams:
            self._selector.register(stream.descriptor.fileno(), selectors.EVENT_READ, stream)

    def _read(self, stream: _Stream) -> bool:
        """Take what is there; whether there may be more."""
        try:
            data = os.read(stream.descriptor.fileno(), CHUNK_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._end_stream(stream)
            return False
        self._pass_on(stream, stream.splitter.feed(data))
        return True

    def _end_streams(self, printed: Printed) -> None:
        mine = [key.data for key in self._selector.get_map().values() if key.data and key.data.printed is printed]
        for stream in mine:
            while self._read(stream):
                pass
            if stream.descriptor.number >= 0:
                self._end_stream(stream)
        printed.complete()

    def _end_stream(self, stream: _Stream) -> None:
        self._pass_on(stream, stream.splitter.flush())
        self._selector.unregister(stream.descriptor.fileno())
        stream.descriptor.close()

    def _pass_on(self, stream: _Stream, lines: list[str]) -> None:
        printed = stream.printed
        if lines:
            printed.write("".join(f"{line}\n" for line in lines).encode())
        printed.all_lines.extend(lines)
        if stream.is_error:
            printed.error_lines.extend(lines)
        for line in lines:
            self._put(printed.label, stream.is_error, line)

    # -- the thread that shows ---------------------------------------------------------------------------------------

    def _put(self, label: str, is_error: bool, line: str) -> None:
        try:
            if self._num_left_out:
                self._lines.put_nowait(self._note_left_out())
                self._num_left_out = 0
            self._lines.put_nowait((label, is_error, line))
        except queue.Full:
            self._num_left_out += 1

    def _note_left_out(self) -> tuple[str, bool, str]:
        return "", True, f"{self._num_left_out} lines are not shown here; they are in the logs"

    def _print_all(self) -> None:
        while (item := self._lines.get()) is not None:
            # Nobody looks on any more (a closed pipe, a closed terminal); the logs go on.
            with contextlib.suppress(OSError, ValueError):
                self._show(*item)
