"""How much of its time the training thread waits for a processor that others use: Linux only, elsewhere nothing is
known."""

from __future__ import annotations

import time
from pathlib import Path

_EVERY_S = 1.0
_SOURCE = Path("/proc/thread-self/schedstat")  # nanoseconds on a processor, nanoseconds ready but waiting for one, ...


class Starvation:
    """Used by the thread it is about."""

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._part = 0.0

    def look(self) -> float:
        """The part of the last seconds, 0 to 1; looked at once a second at most."""
        now = time.monotonic()
        if self._last is not None and now - self._last[0] < _EVERY_S:
            return self._part
        waited_s = _waited_s()
        if self._last is not None:
            self._part = min(1.0, max(0.0, waited_s - self._last[1]) / (now - self._last[0]))
        self._last = (now, waited_s)
        return self._part


def _waited_s() -> float:
    try:
        return int(_SOURCE.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
