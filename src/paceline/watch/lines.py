"""Looks as lines, for a log or a pipe: a line for each event, and one of progress now and then. No control characters.

A line of progress is written when the state changed or the steps stopped, every tenth of an epoch, or `every_s` after
the last one if anything moved; never more than one a second but for such a change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from paceline.control.journal.reader import EventRow
from paceline.watch import servers, words
from paceline.watch.follower import Trouble
from paceline.watch.live import event_text, figures
from paceline.watch.look import Look
from paceline.watch.names import Names

FIRST_EVENTS = 10  # of a run that has gone on for long
PARTS = 10
SHORTEST_S = 1.0


class Lines:
    """`write` gets every line; `now` is any clock that does not go back."""

    def __init__(self, write: Callable[[str], None], now: Callable[[], float], *, every_s: float = 5.0) -> None:
        self._write, self._now, self._every_s = write, now, every_s
        self._is_first = True
        self._trouble = ""
        self._said: tuple[str, int, int] | None = None  # condition, part of the training, operation
        self._said_at = 0.0

    def show(self, look: Look | Trouble, events: Iterable[EventRow], *, is_last: bool = False) -> None:
        self._show_events(list(events), Names() if isinstance(look, Trouble) else look.names)
        if isinstance(look, Trouble):
            if look.text != self._trouble:
                self._trouble = look.text
                self._write(words.one_line(look.text, 300))
            return
        self._trouble = ""
        part = int((look.fraction or 0.0) * PARTS) + (look.epoch or 0) * (PARTS + 1)
        condition = f"{look.state} {look.is_deserted} {look.quiet_s > 0}"
        says = (condition, part, look.operation)
        if self._is_due(says) or (is_last and says != self._said):
            self._said, self._said_at = says, self._now()
            self._write(progress_line(look))

    def _is_due(self, says: tuple[str, int, int]) -> bool:
        if self._said is None or says[0] != self._said[0]:
            return True
        waited_s = self._now() - self._said_at
        if says == self._said or waited_s < SHORTEST_S:
            return False
        return says[1] != self._said[1] or waited_s >= self._every_s

    def _show_events(self, events: list[EventRow], names: Names) -> None:
        if self._is_first and len(events) > FIRST_EVENTS:
            self._write(f"... {words.count(len(events) - FIRST_EVENTS, 'earlier event')}")
            events = events[-FIRST_EVENTS:]
        self._is_first = self._is_first and not events
        for event in events:
            self._write(f"{words.clock(event.time)} {event_text(event, names)}")


def progress_line(look: Look) -> str:
    """12:00:04 digits running, epoch 1/3 (40%), step 12, loss 2.1, 3,400 samples/s, 40 s left, 4 workers, ..."""
    parts = [f"{words.clock(look.now)} {words.one_line(look.name, 40)} {look.state}", *figures(look)]
    if look.living_workers:
        parts.append(words.count(len(look.living_workers), "worker"))
    if look.living_servers:
        parts.append(servers.in_one_line(look.living_servers))
    if look.is_deserted:
        parts.append("its coordinator is gone")
    elif look.quiet_s:
        parts.append(f"no step for {words.duration(look.quiet_s)}")
    return ", ".join(parts)
