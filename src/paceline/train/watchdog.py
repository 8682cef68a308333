"""Notices a worker that lives but does not get on, and says where it stands.

Heartbeats come from a thread of their own, so a training thread that hangs (in a data set, a lock, a kernel call) still
looks alive. After `stuck_s` in one operation this prints the member, the operation and the Python stack of every thread
to standard error, which is the worker's log; then again after twice the time, and so on. It ends nothing: only a person
knows whether an hour is long for this step.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple, TextIO

STUCK_S = 300.0


class WorkerActivity(NamedTuple):
    """Where a worker stands: what it is doing, and since when."""

    text: str
    since: float


class Watchdog:
    """`look` tells where the worker stands, or None while it is in no operation."""

    def __init__(
        self, look: Callable[[], WorkerActivity | None], *, stuck_s: float = STUCK_S, log: TextIO | None = None
    ) -> None:
        self._look = look
        self._stuck_s = stuck_s
        self._log = log
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        told: tuple[float, float] = (0.0, self._stuck_s)  # the operation that was told of, and when to tell again
        while not self._closing.wait(self._stuck_s / 10):
            standing = self._look()
            if standing is None:
                continue
            limit_s = told[1] if told[0] == standing.since else self._stuck_s
            stood_s = time.monotonic() - standing.since
            if stood_s > limit_s:
                told = (standing.since, 2 * stood_s)
                print(describe(standing, stood_s), file=self._log or sys.stderr, flush=True)

    def close(self) -> None:
        self._closing.set()
        self._thread.join()


def describe(standing: WorkerActivity, stood_s: float) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = [f"paceline: no progress for {stood_s:.0f} s: {standing.text}. The stacks of this process:"]
    for ident, frame in sys._current_frames().items():
        lines.append(f"  thread {names.get(ident, ident)}:")
        lines += ["  " + line for line in "".join(traceback.format_stack(frame)).rstrip().splitlines()]
    return "\n".join(lines)
