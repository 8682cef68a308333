"""A coordinator for measurements whose workers are no children of an agent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell import config as configs
from paceline.control.shell import ticket as tickets
from paceline.control.shell.config import Config
from paceline.control.shell.ticket import Ticket

_START_S = 60.0


@contextlib.contextmanager
def coordinator(folder: Path, settings: RunSettings) -> Iterator[Ticket]:
    """That of a run in this folder; what its workers need to find it."""
    with (folder / "coordinator.log").open("wb") as log:
        process = configs.launch(Config.new(run=folder.name, folder=folder, settings=settings), stdout=log, stderr=log)
    try:
        ends_at = time.monotonic() + _START_S
        while not (folder / tickets.ACCESS_FILE).exists():
            if process.poll() is not None or time.monotonic() > ends_at:
                raise RuntimeError(f"the coordinator did not start (exit code {process.poll()}): {folder}")
            time.sleep(0.01)
        yield tickets.read_access(folder).ticket
    finally:
        process.kill()
        process.wait()
