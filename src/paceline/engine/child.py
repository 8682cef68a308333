"""The coordinator as a child of the agent: started with one config, again and again if need be."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
from pathlib import Path
from typing import BinaryIO

import msgspec

from paceline.control.exit_codes import ENDED, FAILED
from paceline.control.journal.disk import words_of
from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.control.shell import config as configs
from paceline.control.shell.config import Config
from paceline.control.shell.ticket import Ticket, read_access
from paceline.engine.events import CoordinatorEnded
from paceline.engine.reaper_handle import ReaperHandle
from paceline.wire.card import this_host
from paceline.wire.descriptors import Fd
from paceline.wire.identity import Identity

logger = logging.getLogger("paceline.engine")

LOG = "coordinator.log"
LINES_SHOWN = 15
VERDICTS = {ENDED: ("ended", "interrupted"), FAILED: ("failed",)}  # what it has written down then


def ticket_of(config: Config, agent: str) -> Ticket:
    """The ticket of this host's workers: they meet the coordinator by its local name, so that they can be started
    before it listens anywhere."""
    return Ticket(
        run=config.run,
        folder=config.folder,
        address=(config.advertised, config.port),
        local_name=config.local_name,
        host=this_host(),
        secret=config.secret,
        fingerprint=Identity(config.member, pem=config.pem).fingerprint,
        tls=config.tls,
        agent=agent,
        resumed=config.resumed,
    )


class CoordinatorChild:
    """Used by the agent's thread."""

    def __init__(self, config: Config, agent: str, logs: Path, reaper: ReaperHandle) -> None:
        self._config = config
        self._agent = agent
        self.folder = Path(config.folder)
        self.log = logs / LOG
        self._reaper = reaper
        self._popen: subprocess.Popen[bytes] | None = None
        self._exit: Fd | None = None
        self.has_listened = False

    def start(self) -> None:
        with self._open_log() as log:
            self._popen = configs.launch(
                self._config, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._config = msgspec.structs.replace(self._config, is_again=True)
        self._exit = Fd(os.pidfd_open(self._popen.pid))
        self._reaper.entrust(self._popen.pid, ask=True)

    def _open_log(self) -> BinaryIO:
        try:
            return self.log.open("ab")
        except OSError as error:  # better without a log than not at all
            logger.warning("%s", words_of(self.log, error))
            return open(os.devnull, "ab")

    @property
    def is_running(self) -> bool:
        return self._popen is not None

    def fileno(self) -> int:
        assert self._exit is not None
        return self._exit.fileno()

    def find_ticket(self) -> Ticket | None:
        """The ticket that leads to it from anywhere; None until it listens."""
        if self._popen is None:
            return None
        try:
            access = read_access(self.folder)
        except ValueError:
            return None
        if access.pid != self._popen.pid:
            return None
        self.has_listened = True
        self._config = msgspec.structs.replace(self._config, last_port=access.ticket.address[1])
        return msgspec.structs.replace(access.ticket, agent=self._agent)

    def take_exit(self) -> CoordinatorEnded | None:
        """How it ended, and what it has written down of the run; None while it lives."""
        if self._popen is None or (code := self._popen.poll()) is None:
            return None
        assert self._exit is not None
        self._reaper.forget(self._popen.pid)
        self._exit.close()
        self._popen = self._exit = None
        if code in (ENDED, FAILED):
            # A crash of the interpreter has the exit code of a failure too; only what was written down counts.
            with contextlib.suppress(JournalError), RunReader(self.folder) as reader:
                status = reader.status().status
                mine = [row for row in reader.members() if row.agent == self._agent]
                released = frozenset(row.pid for row in mine if row.fate == "released")
                if status in VERDICTS[code]:
                    verdict = "failed" if code == FAILED else "ended"
                    return CoordinatorEnded(code, verdict, released, frozenset(row.pid for row in mine))
        return CoordinatorEnded(code, "")

    def signal(self, number: int) -> None:
        if self._popen is not None:
            self._popen.send_signal(number)

    def last_lines(self) -> list[str]:
        try:
            return self.log.read_text(errors="replace").splitlines()[-LINES_SHOWN:]
        except OSError:
            return []

    def close(self) -> None:
        """End it if it still lives; for ways out that no rule has foreseen."""
        if self._popen is not None:
            self._popen.send_signal(signal.SIGKILL)
            self._popen.wait()
            self.take_exit()
