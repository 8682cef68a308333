"""How a worker's process ends: the script's end, an exception, a signal, a coordinator that is gone."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from paceline.control.exit_codes import HALTED
from paceline.errors import Disagreement, EndedAlone, Mismatch

TOGETHER_S = 0.3  # signals that come in this time are one: `timeout` sends each twice

if TYPE_CHECKING:
    from paceline.train.run import Run


class Endings:
    """Looks after one run from the moment it has joined a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.has_failed = False
        self._pid = os.getpid()
        self._hook: Any = None
        self._handlers: dict[int, Any] = {}
        self._asked_by = 0
        self._asked_at = 0.0
        self._is_alone = True
        self._exit = sys.exit
        self._exited: tuple[Any, int] | None = None  # with which code, and after which operation

    def watch(self, *, is_alone: bool, has_checkpoints: bool) -> None:
        """From now on a signal asks for the end after the step under way. Of a run that has other processes SIGINT does
        so too: Ctrl-C is for the agent, and a worker that gets it was signalled together with all others. Alone,
        Ctrl-C does what people expect of it, unless a step can be saved; a second one always does."""
        # Before the handlers of `atexit`, which end what a last operation needs; threads can still be started.
        threading._register_atexit(self._at_exit)  # type: ignore[attr-defined]
        self._hook, sys.excepthook = sys.excepthook, self._on_exception
        self._exit, sys.exit = sys.exit, self._on_exit  # for one outside of loops: no other hook is told of a code
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGTERM]
            if (not is_alone or has_checkpoints) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                numbers.append(signal.SIGINT)
            self._handlers = {number: signal.signal(number, self._on_signal) for number in numbers}
            self._is_alone = is_alone

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child, as a loader worker is, has this handler too
        operation = self._run.operation
        exited = self._exited if self._exited is not None and self._exited[1] == operation else None
        if exited is not None and exited[0]:
            self.failed(SystemExit(exited[0]))  # others must not wait for its end
            return
        try:
            self._run.close()
        except BaseException as error:
            if exited is not None and isinstance(error, Mismatch | Disagreement):
                error = _ended_alone(operation)
            traceback.print_exception(error)
            self.failed(error)
            _exit_now(1)
        if self._run.halting.has_halted:
            _exit_now(HALTED)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        self.failed(error)

    def _on_exit(self, status: Any = None, /) -> NoReturn:
        self._note_exit(status)
        self._exit(status)

    def loop_left(self) -> None:
        """A loop over batches or epochs is given up: by a break, or by what is raised in its body."""
        if self._hook is not None and (leaving := exit_under_way()) is not None:
            self._note_exit(leaving.code)

    @contextlib.contextmanager
    def watching_for_exit(self) -> Iterator[None]:
        """Around functions of the script."""
        try:
            yield
        except SystemExit as leaving:
            self._note_exit(leaving.code)
            raise

    def _note_exit(self, code: Any) -> None:
        """The script may catch it and go on; then another operation follows."""
        self._exited = (code, self._run.operation)

    def failed(self, error: BaseException) -> None:
        """Tell the others why this worker goes."""
        if not self.has_failed:
            self.has_failed = True
            self._run.fail("".join(traceback.format_exception(error)).strip())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._asked_by and now < self._asked_at + TOGETHER_S:
            return
        if self._run.give_up_saving():
            self._asked_by, self._asked_at = self._asked_by or number, now
            return
        if self._is_alone and number == signal.SIGINT:
            if self._asked_by:
                raise KeyboardInterrupt
            # Not by `print`, which it may have interrupted.
            os.write(2, b"paceline: stopping after this step; Ctrl-C again to stop now\n")
        self._asked_by, self._asked_at = self._asked_by or number, now
        # Not from here: the interrupted thread may hold the lock that is needed.
        threading.Thread(target=self._run.leave, name="paceline-leave", daemon=True).start()

    @property
    def exit_code(self) -> int:
        """Of a process that ends before its script does. Where it is all of the run, its code says so."""
        return 128 + self._asked_by if self._asked_by and self._is_alone else 0

    def close(self) -> None:
        if self._hook is not None:
            sys.excepthook = self._hook
            self._hook = None
            sys.exit = self._exit
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}


def _ended_alone(operation: int) -> EndedAlone:
    return EndedAlone(
        f"the script ended on this worker after operation {operation}, by SystemExit with code 0, and the others went "
        "on; end it on all workers at the same point (`session.should_stop`), or let one leave with `paceline drain`"
    )


def exit_under_way() -> SystemExit | None:
    """The `SystemExit` that leaves a loop just now; asked by the iterator of that loop, when it is closed for that.

    The interpreter tells nobody of one that a script raises by itself, without `sys.exit`. But it closes the iterators
    of a frame that an exception leaves while that exception lives: then it is among all objects, and nothing of the
    program refers to it. One that was made or caught before, and still lives, is kept somewhere."""
    kept: set[int] = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # variables of functions that are at work are in no object
        kept.update(map(id, frame.f_locals.values()))
        frame = frame.f_back
    found: list[SystemExit] = [one for one in gc.get_objects() if issubclass(type(one), SystemExit)]
    while found:
        one = found.pop()
        # A frame that refers to it is this one, or one through which it came.
        if id(one) not in kept and all(isinstance(by, FrameType) or by is found for by in gc.get_referrers(one)):
            return one
    return None


def _exit_now(code: int) -> None:
    """The interpreter is ending already, and would end with 0."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
