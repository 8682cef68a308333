"""How a rehearsal looks at its workers."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from paceline.testing.rehearsal import RehearsalWorker

pytestmark = pytest.mark.timeout(30)


class ReadOnce:
    """As a forked process is: whoever reads its exit code while another does so gets 255, and 255 is kept."""

    pid = 1

    def __init__(self) -> None:
        self._known: int | None = None
        self._taken = False

    @property
    def exitcode(self) -> int:
        if self._known is None:
            taken, self._taken = self._taken, True
            time.sleep(0.02)  # both are inside before one of them is done
            self._known = 255 if taken else 0
        return self._known


def test_an_exit_code_is_read_by_one_thread_at_a_time() -> None:
    ours, _theirs = Pipe()
    worker, together = RehearsalWorker(ReadOnce(), ours), threading.Barrier(4)

    def read(_: int) -> int | None:
        together.wait()
        return worker.exit_code

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read, range(4))) == [0, 0, 0, 0]
