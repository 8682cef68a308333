"""Follows a run until it is told to stop: a live display on a terminal, plain lines elsewhere.

Promises
- It returns when `stop` is set, after showing the last state once; it waits for nothing longer than the database's own
  limit for a lock.
- It never raises. If the output cannot be written (a terminal that is gone, a full disk) it says so in the log and
  returns.
- It never writes the database.

While it runs on a terminal, whoever else prints does it through the same console (`console.print`): rich then puts it
above the display. That console should be a `RunConsole`: a plain one ends the process when its reader goes away.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from paceline.watch import words
from paceline.watch.follower import Follower, Trouble
from paceline.watch.lines import Lines
from paceline.watch.live import picture
from paceline.watch.look import Look

logger = logging.getLogger("paceline.watch")

MOST_OF_A_CORE = 0.1


class RunConsole(Console):
    """A console whose reader may go away (`paceline run | head`): it is quiet from then on, and the run goes on.
    That of rich turns the process's standard output to nothing and raises `SystemExit` in whichever thread printed."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def watch(
    folder: Path,
    stop: threading.Event,
    *,
    plain: bool | None = None,
    console: Console | None = None,
    interval_s: float = 0.2,
) -> None:
    """Show the run in `folder` until `stop` is set. `plain` unless said: where the console is no terminal that can
    redraw. `interval_s` is between two looks. Blocks; give it a thread of its own."""
    try:
        console = console or RunConsole()
        if plain is None:
            plain = not console.is_terminal or console.is_dumb_terminal
        show = _watch_plain if plain else _watch_live
        with contextlib.closing(Follower(folder)) as follower:
            show(follower, stop, console, interval_s)
    except (Exception, SystemExit):
        # What a person sees must not be able to end what is being seen.
        logger.exception("the display of %s ended; the run goes on, see `paceline status`", folder)


def _watch_live(follower: Follower, stop: threading.Event, console: Console, interval_s: float) -> None:
    # Refreshed here and nowhere else: the thread that reads is the one that draws.
    live = Live(Text(""), console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    last: Look | None = None
    try:
        live.start()
        while True:
            is_last = stop.is_set()
            began = time.monotonic()
            found = follower.look()
            follower.take_events()
            last = found if isinstance(found, Look) else last
            live.update(_drawn(found, last, console), refresh=True)
            if is_last:
                return
            _pause(stop, interval_s, began)
    finally:
        live.stop()  # also one that failed to start, which the console would go on drawing


def _drawn(found: Look | Trouble, last: Look | None, console: Console) -> RenderableType:
    width, height = console.size
    if isinstance(found, Look):
        return picture(found, width, height)
    trouble = Text(words.one_line(found.text, 300), style="dim" if found.is_early else "yellow")
    if found.is_early or last is None:
        return trouble
    return Group(picture(last, width, height - 1), trouble)


def _watch_plain(follower: Follower, stop: threading.Event, console: Console, interval_s: float) -> None:
    def write(line: str) -> None:
        console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)

    lines = Lines(write, time.monotonic)
    while True:
        is_last = stop.is_set()
        began = time.monotonic()
        lines.show(follower.look(), follower.take_events(), is_last=is_last)
        if is_last:
            return
        _pause(stop, interval_s, began)


def _pause(stop: threading.Event, interval_s: float, began: float) -> None:
    """Longer where looking takes long, as in a run of a million steps: the cores are there for the training."""
    stop.wait(max(interval_s, (time.monotonic() - began) / MOST_OF_A_CORE))
