"""How a worker's process ends: the script's end, an exception, a signal, a coordinator that is gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from paceline.engine.base import HALTED

if TYPE_CHECKING:
    from paceline.train.session import Session


class Endings:
    """Looks after one session from the moment it has joined a run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.has_failed = False
        self._pid = os.getpid()
        self._hook: Any = None
        self._handler: Any = None

    def watch(self) -> None:
        # Before the handlers of `atexit`, which end what a last operation needs; threads can still be started.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]
        self._hook, sys.excepthook = sys.excepthook, self._on_exception
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, self._on_signal)

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, as a loader worker is, has this handler too
        try:
            self._session.close()
        except BaseException as error:
            traceback.print_exception(error)
            self.failed(error)
            _exit_now(1)
        if self._session.halting.has_halted:
            _exit_now(HALTED)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        self.failed(error)

    def failed(self, error: BaseException) -> None:
        """Tell the others why this worker goes."""
        if not self.has_failed:
            self.has_failed = True
            self._session.fail("".join(traceback.format_exception(error)).strip())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Not from here: the interrupted thread may hold the lock that is needed.
        threading.Thread(target=self._session.leave, name="paceline-leave", daemon=True).start()

    def close(self) -> None:
        if self._hook is not None:
            sys.excepthook = self._hook
            self._hook = None
        if self._handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None


def _exit_now(code: int) -> None:
    """The interpreter is ending already, and would end with 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
