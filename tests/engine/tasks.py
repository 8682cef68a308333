"""Functions that the tests of `launch` send to workers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any


def rank_times(factor: int) -> tuple[int, int]:
    return int(os.environ["RANK"]) * factor, os.getpid()


def fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        raise LookupError(f"rank {rank} lost it")
    time.sleep(600)


class Unportable(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def fail_strangely() -> None:
    raise Unportable(1, 2)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def return_unportable() -> Any:
    return lambda: 0
