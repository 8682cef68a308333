"""What a run left behind in its folder, in words: for the message of a test that failed where nobody can look."""

from __future__ import annotations

from pathlib import Path

from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader

_NUM_EVENTS = 60
_NUM_LINES = 40  # of each log


def account_of(folder: Path) -> str:
    """The last events of a run, and the last lines of its logs."""
    parts = [f"events of {folder}:", *_events(folder)]
    for path in sorted(folder.rglob("*.log")):
        lines = path.read_text(errors="replace").splitlines()[-_NUM_LINES:]
        parts += [f"{path.relative_to(folder)}:", *(f"  {line}" for line in lines)] if lines else []
    return "\n".join(parts)


def _events(folder: Path) -> list[str]:
    try:
        with RunReader(folder) as reader:
            events = list(reader.events())[-_NUM_EVENTS:]
    except JournalError as error:
        return [f"  {error}"]
    return [f"  {event.time:.3f} {event.kind} {event.member}: {event.text}" for event in events]
