"""Which process was started under which label: w0, w1, s0, ... as `paceline run` prints them.

The agent writes it into the folder of its run, for commands and displays that name members as the output does. It
knows the processes of its own machine only.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

LABELS_FILE = "workers.json"


class StartedProcesses(msgspec.Struct, frozen=True):
    """The process ids of each slot, by its label, the newest last."""

    slots: dict[str, list[int]] = {}

    @property
    def label_of(self) -> dict[int, str]:
        return {pid: label for label, pids in self.slots.items() for pid in pids}


def read_started(folder: Path) -> StartedProcesses:
    """Nothing where nothing can be read."""
    try:
        return msgspec.json.decode((folder / LABELS_FILE).read_bytes(), type=StartedProcesses)
    except (OSError, msgspec.DecodeError):
        return StartedProcesses()


def write_started(folder: Path, slots: Mapping[str, list[int]]) -> None:
    """Raises `OSError`, and what was there before stays."""
    draft = folder / f".{LABELS_FILE}"
    try:
        draft.write_bytes(msgspec.json.encode(StartedProcesses(dict(slots))))
        draft.replace(folder / LABELS_FILE)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
