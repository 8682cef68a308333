"""Waiting for what another thread or process does: by looking again and again, under a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 60.0  # far above what anything takes: a busy machine is no failure
_LOOK_S = 0.005

T = TypeVar("T")


def eventually(condition: Callable[[], T], what: str, *, timeout_s: float = WAIT_S, look_s: float = _LOOK_S) -> T:
    """What the condition says as soon as it holds; an AssertionError if it does not within this time."""
    ends_at = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > ends_at:
            raise AssertionError(f"waited {timeout_s:g} s in vain: {what}")
        time.sleep(look_s)
    return found
