"""A worker that does not get on says where it stands."""

from __future__ import annotations

import io
import threading
import time

from paceline.train.watchdog import Watchdog, WorkerActivity


class Log(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def hang(until: threading.Event) -> None:
    until.wait(30)


def test_a_stuck_worker_names_its_operation_and_shows_its_stack() -> None:
    log, release = Log(), threading.Event()
    thread = threading.Thread(target=hang, args=(release,), name="training")
    thread.start()
    began = time.monotonic()
    watchdog = Watchdog(lambda: WorkerActivity("worker w1 is in operation 7 (step)", began), stuck_s=0.05, log=log)
    assert log.written.wait(20)
    watchdog.close()
    release.set()
    thread.join()
    text = log.getvalue()
    assert "worker w1 is in operation 7 (step)" in text
    assert "thread training:" in text
    assert "in hang" in text


def test_a_worker_that_gets_on_says_nothing() -> None:
    log = Log()
    looks = threading.Semaphore(0)

    def look() -> WorkerActivity:
        looks.release()
        return WorkerActivity("worker w1 is in another operation each time", time.monotonic())

    watchdog = Watchdog(look, stuck_s=0.05, log=log)
    for _ in range(20):
        assert looks.acquire(timeout=20)
    watchdog.close()
    assert log.getvalue() == ""
