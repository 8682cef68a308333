"""Why a run failed, as the last lines that a person sees: who, where, and the script's own words."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.control.exit_codes import exit_words
from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.control.tracebacks import TRACEBACK
from paceline.engine.base import Process
from paceline.engine.events import RunOutcome

LINES_SHOWN = 30
MOST_LINES = 100
_CHAINS = ("During handling of the above exception", "The above exception was the direct cause")


def explain(
    outcome: RunOutcome, folder: Path, ended: Mapping[int, Process], coordinator_lines: Sequence[str]
) -> list[str]:
    """`ended` are the last processes of the slots; `coordinator_lines` the end of its log."""
    if outcome.slot in ended:
        return _of_process(ended[outcome.slot])
    if outcome.slot >= 0:
        return [outcome.reason]
    if outcome.reason.startswith("the coordinator"):
        return [f"{outcome.reason}; the end of its log:", *coordinator_lines]
    return _of_run(outcome.reason, folder, ended)


def _of_process(process: Process) -> list[str]:
    words, lines = exit_words(process.exit_code() or 0), tail(process.last_lines())
    who = f"{process.label} (process {process.pid} on {socket.gethostname()})"
    return [f"{who} {words}{':' if lines else ', without a word'}", *lines]


def _of_run(reason: str, folder: Path, ended: Mapping[int, Process]) -> list[str]:
    """What the coordinator says; followed by the words of a worker that failed, or of a server if none did, unless it
    quotes one."""
    lines = (reason or _written_reason(folder)).splitlines()
    failed = [process for process in ended.values() if process.exit_code() not in (0, None)]
    failed.sort(key=lambda process: process.label.startswith("s"))
    if not failed or any(line.startswith(TRACEBACK) for line in lines):
        return lines[:1] + lines[1:][-MOST_LINES:]
    return [*lines, *_of_process(failed[0])]


def _written_reason(folder: Path) -> str:
    with contextlib.suppress(JournalError), RunReader(folder) as reader:
        return reader.status().reason
    return ""


def tail(lines: Sequence[str]) -> list[str]:
    """The last lines; all of the last traceback, with what led to it, if there is one."""
    found = [number for number, line in enumerate(lines) if line.startswith(TRACEBACK)]
    if not found:
        return list(lines[-LINES_SHOWN:])
    start = found.pop()
    while found and any(line.startswith(_CHAINS) for line in lines[found[-1] : start]):
        start = found.pop()
    return list(lines[start:][-MOST_LINES:])
