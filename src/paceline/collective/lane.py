"""The order in which a member does its operations: one at a time, as they were called.

A call that waits runs on the calling thread, unless earlier asynchronous ones are still under way; those run on the
lane's own thread, which exists from the first of them on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from paceline.collective.arguments import flat
from paceline.errors import DeadlineExceeded

Job = Callable[[bool], None]


class Handle:
    """An operation under way. Its tensors belong to it until `wait` returned."""

    __slots__ = ("_future", "_is_mine", "_operation")

    def __init__(self, operation: str, future: Future[None], is_mine: Callable[[], bool] | None = None) -> None:
        self._operation = operation
        self._future = future
        self._is_mine = is_mine  # whether the current thread is the one that must do it

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the operation is complete, or raise what it raised. The operation has a deadline of its own."""
        if not self._future.done() and self._is_mine is not None and self._is_mine():
            raise RuntimeError(
                f"{self._operation}: waited for by the thread that must do it, which would wait for ever; in a "
                "callback, or in another operation, leave the waiting to another thread"
            )
        try:
            self._future.result(timeout_s)
        except TimeoutError as error:
            if self._future.done():
                self._future.result()
                return
            raise DeadlineExceeded(f"{self._operation}: not complete after {timeout_s} s") from error

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> BaseException | None:
        """What a complete operation raised, if it did."""
        return self._future.exception()

    def add_done_callback(self, callback: Callable[[Handle], object]) -> None:
        """Call `callback(handle)` when complete: at once if it is, else on the lane's thread."""
        self._future.add_done_callback(lambda _: callback(self))


class Receiving(Handle):
    """A receive under way. `source` is who the message came from, when it is complete. Its deadline counts from the
    first `wait` without a `timeout_s`."""

    __slots__ = ("_await_now", "_write_back", "source")

    def __init__(
        self,
        operation: str,
        future: Future[int],
        whole: flat | None = None,
        await_now: Callable[[], None] | None = None,
        is_mine: Callable[[], bool] | None = None,
    ) -> None:
        arrived: Future[None] = Future()
        super().__init__(operation, arrived, is_mine)
        self._write_back = whole
        self._await_now = await_now
        self.source = -1
        future.add_done_callback(self._arrive)

    def wait(self, timeout_s: float | None = None) -> None:
        if timeout_s is None and self._await_now is not None:
            self._await_now()
        super().wait(timeout_s)

    def _arrive(self, future: Future[int]) -> None:
        error = future.exception()
        if error is not None:
            self._future.set_exception(error)
            return
        self.source = future.result()
        if self._write_back is not None:
            self._write_back.__exit__(None)
        self._future.set_result(None)


def received(source: int) -> Receiving:
    """One that is complete."""
    future: Future[int] = Future()
    future.set_result(source)
    return Receiving("done", future)


def _complete() -> Handle:
    future: Future[None] = Future()
    future.set_result(None)
    return Handle("done", future)


DONE = _complete()


class Lane:
    """A job is called with True where it may spin, which a background thread must not."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Re-entrant for a signal handler that closes the group in the middle of an operation of this thread.
        self._turn = threading.RLock()
        self._at_work: threading.Thread | None = None  # who has the turn, if it took it to wait
        self._guard = threading.Lock()
        self._num_pending = 0
        self._queue: queue.SimpleQueue[tuple[Job, Future[None], bool] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    def run(self, operation: str, job: Job) -> None:
        """Do the job and return when it is done. From within another job, or from a callback on the lane's thread, it
        is done before what is queued."""
        current = threading.current_thread()
        if self._num_pending and current is not self._thread and current is not self._at_work:
            self.submit(operation, job).wait()
            return
        with self._turn:
            outer, self._at_work = self._at_work, current
            try:
                job(current is not self._thread)
            finally:
                self._at_work = outer

    def submit(self, operation: str, job: Job) -> Handle:
        """Do the job after those before it, on the lane's thread."""
        future: Future[None] = Future()
        with self._guard:
            if self._closed:
                job(False)  # which raises, because the group is closed
                raise AssertionError(f"{operation} was possible on a closed group")
            self._num_pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            # Which tensors may be changed is a matter of the caller's thread.
            self._queue.put((job, future, torch.is_inference_mode_enabled()))
        return Handle(operation, future, self._is_mine)

    def _is_mine(self) -> bool:
        return threading.current_thread() in (self._thread, self._at_work)

    def _work(self) -> None:
        while (entry := self._queue.get()) is not None:
            job, future, is_inference = entry
            error: BaseException | None = None
            try:
                with self._turn, torch.inference_mode(is_inference):
                    job(False)
            except BaseException as raised:
                error = raised
            with self._guard:
                self._num_pending -= 1
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
            del entry, job, future, error  # an idle lane holds no tensor alive

    def disown(self) -> None:
        """In a forked child, where no other thread is left, whatever it held."""
        self._turn, self._guard = threading.RLock(), threading.Lock()
        self._thread = self._at_work = None
        self._num_pending, self._closed = 0, True

    def close(self) -> None:
        """Let the thread end after what is queued; the caller has made that fail or finish."""
        with self._guard:
            thread, self._closed = self._thread, True
            if thread is not None:
                self._queue.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._turn:
            return
