"""The logs of an agent that joined a run: what its processes print reaches the run's own folder while they print it.

A thread of its own looks at the logs twice a second and sends what is new, a piece at a time. It goes by how much the
run's host has, so nothing is missing or doubled after a coordinator's death. A host that cannot be reached holds up
nobody: the logs are here too, and the rest follows. At the end there are `CLOSING_S` for the last lines.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.control.journal.labels import LABELS_FILE
from paceline.custody.custodian import MAX_LOG_PIECE, LogPiece
from paceline.custody.depot import Depot
from paceline.errors import CallFailed, WireError

logger = logging.getLogger("paceline.engine")

LOOK_S = 0.5
ASK_S = 5.0
CLOSING_S = 5.0


def folder_of(agent: str) -> str:
    """What the folder of an agent's logs is called at the run's host: the machine, and which of its agents."""
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname()).strip("-.") or "host"
    return f"{host[:60]}-{agent[:8]}"


class LogShipper:
    """Sends the logs of `folder` from when it is made until `close`."""

    def __init__(self, folder: Path, logs: Path, name: str, depot: Depot) -> None:
        self._labels = folder / LABELS_FILE
        self._logs = logs
        self._name = name
        self._depot = depot
        self._sent: dict[str, int] = {}
        self._told: bytes = b""
        self._closing = threading.Event()
        self._ends_at = 0.0
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="paceline-shipper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send what is left, within `CLOSING_S`."""
        self._ends_at = time.monotonic() + CLOSING_S
        self._closing.set()
        self._thread.join()
        self._depot.close()

    def _run(self) -> None:
        while not self._closing.wait(LOOK_S):
            self._send_all(lambda: not self._closing.is_set())
        self._send_all(lambda: time.monotonic() < self._ends_at)

    def _send_all(self, goes_on: Callable[[], bool]) -> None:
        try:
            self._send_labels()
            for log in sorted(self._logs.glob("*.log")):
                while self._send_piece(log) and goes_on():
                    pass
            self._complained = False
        except (WireError, CallFailed, OSError) as error:
            if not self._complained:
                logger.warning("the logs do not reach the run's host: %s; trying again", error)
            self._complained = True

    def _send_labels(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            labels = self._labels.read_bytes()[:MAX_LOG_PIECE]
            if labels != self._told:
                self._ask(LogPiece(self._name, LABELS_FILE, 0, labels, replaces=True))
                self._told = labels

    def _send_piece(self, log: Path) -> bool:
        """Whether there may be more."""
        sent = self._sent.get(log.name)
        if sent is None:
            sent = self._sent[log.name] = self._ask(LogPiece(self._name, log.name, 0, b""))
        with log.open("rb") as file:
            file.seek(sent)
            data = file.read(MAX_LOG_PIECE)
        if not data:
            return False
        self._sent[log.name] = self._ask(LogPiece(self._name, log.name, sent, data))
        return self._sent[log.name] > sent

    def _ask(self, piece: LogPiece) -> int:
        return self._depot.ask_once("append", piece, int, ASK_S)
