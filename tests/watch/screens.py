"""A run as a person sees it: a display that goes on, and one look."""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from paceline.control.journal.reader import RunReader
from paceline.testing.eventually import eventually
from paceline.watch import status
from paceline.watch.display import watch

WAIT_S = 30.0
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Watching:
    """A display in a thread, on a screen that keeps everything."""

    def __init__(self, folder: Path, *, plain: bool | None, terminal: bool, width: int, height: int) -> None:
        self.output = io.StringIO()
        self.console = Console(file=self.output, force_terminal=terminal, width=width, height=height, _environ={})
        self._stop = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(folder, plain), name="paceline-watch")
        self._thread.start()

    def _run(self, folder: Path, plain: bool | None) -> None:
        try:
            watch(folder, self._stop, plain=plain, console=self.console, interval_s=0.01)
        except BaseException as error:
            self.error = error

    @property
    def text(self) -> str:
        """Without what moves the cursor and gives colour."""
        return CONTROL.sub("", self.output.getvalue())

    def see(self, what: str) -> None:
        def is_seen() -> bool:
            has_ended = not self._thread.is_alive()  # looked at before the text, which may be its last
            is_there = what in " ".join(self.text.split())
            assert is_there or not has_ended, f"the display ended before {what!r} was seen: {self.text[-2000:]}"
            return is_there

        eventually(is_seen, f"{what!r} is seen")

    def stop(self) -> str:
        """The last picture, or the last lines."""
        self._stop.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self.error is None
        return self.text


@contextlib.contextmanager
def watching(
    folder: Path, *, plain: bool | None = None, terminal: bool = True, width: int = 120, height: int = 40
) -> Iterator[Watching]:
    shown = Watching(folder, plain=plain, terminal=terminal, width=width, height=height)
    try:
        yield shown
    finally:
        shown.stop()


def drawn(reader: RunReader, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    status.render(reader, console)
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]
