"""Signals to the agent as things to read, in the order they came."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
JOB_CONTROL = (signal.SIGTSTP, signal.SIGCONT)


class Signals:
    """Caught while this is entered, if that is on the main thread; elsewhere Python gives no signals, and nothing ever
    comes. What was ignored before stays so: that is how `nohup` works."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._ends: tuple[int, int] = (-1, -1)
        self._is_main = False

    def __enter__(self) -> Signals:
        self._ends = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._is_main = threading.current_thread() is threading.main_thread()
        if self._is_main:
            self._wakeup_before = signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            for number in (*ENDING, *JOB_CONTROL):
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, _noted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._is_main:
            signal.set_wakeup_fd(self._wakeup_before)
        for end in self._ends:
            os.close(end)

    def fileno(self) -> int:
        return self._ends[0]

    def take(self) -> list[int]:
        """The numbers of those that came."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._ends[0], 4096) if number in self._before]
        return []


def _noted(number: int, frame: FrameType | None) -> None:
    """The descriptor has it already."""
