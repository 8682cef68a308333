"""Where callbacks on futures run: on threads of their own.

A callback may wait for a further operation of its group (a communication hook of DDP that reduces twice does), so it
must not hold up the thread that would do that operation, nor the callbacks of that operation. A thread that is free is
used again, and ends when nothing has come for `IDLE_S`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

IDLE_S = 1.0

Callback = Callable[[], object]


class Callbacks:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Callback] = deque()
        self._num_free = 0
        self._num_busy = 0

    def run(self, callback: Callback) -> None:
        """Soon, on another thread, whatever else runs."""
        with self._changed:
            self._waiting.append(callback)
            if self._num_free >= len(self._waiting):
                self._changed.notify()
                return
        threading.Thread(target=self._work, name="paceline-callback", daemon=True).start()

    def _work(self) -> None:
        while (callback := self._next()) is not None:
            try:
                callback()
            finally:
                del callback  # and what it holds alive
                with self._changed:
                    self._num_busy -= 1
                    self._changed.notify_all()

    def _next(self) -> Callback | None:
        with self._changed:
            self._num_free += 1
            self._changed.wait_for(lambda: self._waiting, IDLE_S)
            self._num_free -= 1
            if not self._waiting:
                return None
            self._num_busy += 1
            return self._waiting.popleft()

    def wait_all(self, timeout_s: float) -> None:
        """Return when all are done, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting and not self._num_busy, timeout_s)


_callbacks = Callbacks()
run, wait_all = _callbacks.run, _callbacks.wait_all
# A forked child has none of the threads.
os.register_at_fork(after_in_child=_callbacks.__init__)  # type: ignore[misc]
