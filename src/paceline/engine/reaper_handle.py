"""The agent's handle on its reaper (`reaper.py`): a process that outlives a killed agent just long enough to end the
sessions that the agent has started."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from paceline.engine import reaper

LEAVING_S = 5.0


def guarded(command: list[str], parent: int) -> list[str]:
    """The command that becomes `command` and dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", str(Path(reaper.__file__)), "exec", str(parent), *command]


class ReaperHandle:
    """Used by one thread. If it is killed, it is replaced at the next word that it is told."""

    def __init__(self) -> None:
        self._entrusted: dict[int, str] = {}
        self._process = self._start()

    def entrust(self, session: int, *, ask: bool = False) -> None:
        """End this session when the agent is gone; `ask` gives it a moment to end by itself."""
        self._entrusted[session] = "end" if ask else "kill"
        self._tell(f"{self._entrusted[session]} {session}\n")

    def forget(self, session: int) -> None:
        if self._entrusted.pop(session, None) is not None:
            self._tell(f"forget {session}\n")

    def close(self) -> None:
        for session in list(self._entrusted):
            self.forget(session)
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(reaper.__file__)), "watch"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _tell(self, line: str) -> None:
        try:
            self._write(line)
        except OSError:
            self._end()
            self._process = self._start()
            self._write("".join(f"{order} {session}\n" for session, order in self._entrusted.items()))

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text.encode())
        self._process.stdin.flush()

    def _end(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LEAVING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
