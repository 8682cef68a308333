"""How lines of processes look to a person: `[w0] ` or `[s0] ` in front, in a colour of its own on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = (36, 33, 35, 32, 34, 31)
OWN_PREFIX = "paceline: "


class Terminal:
    """Called by one thread. With a console, which a live display may be drawing on, all that goes to the terminal goes
    through it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console

    def show(self, label: str, is_error: bool, line: str) -> None:
        stream = sys.stderr if is_error else sys.stdout
        if self._console is not None and stream.isatty():
            from rich.text import Text

            self._console.print(Text.from_ansi(_prefixed(label, line, colour=True)), soft_wrap=True)
        else:
            _write(stream, _prefixed(label, line, colour=stream.isatty()) + "\n")


def _prefixed(label: str, line: str, *, colour: bool) -> str:
    if not label:
        return OWN_PREFIX + line
    if not colour:
        return f"[{label}] {line}"
    number = COLOURS[int(label[1:] or 0) % len(COLOURS)]
    return f"\x1b[{number}m[{label}]\x1b[0m {line}"


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(text)
    except UnicodeEncodeError:
        stream.write(text.encode("ascii", "backslashreplace").decode())
    stream.flush()
