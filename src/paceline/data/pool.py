"""The loader workers of one Loader: started together, watched together, ended together.

A pool lives until its first death. Loader workers share a queue with locks in it, and one that is killed may have held
a lock or left half an answer in the pipe; so the others are not to be trusted either. Whoever owns the pool makes the
next one.

- **Noticed at once.** One thread waits for the pidfds of all loader workers. On the first end that nobody asked for it
  ends the others and closes the queue, so a `take` that waits fails at once and not when torch looks again, after 5 s.
- **Signals.** SIGTERM and SIGINT change nothing in a loader worker, from its first instruction on: systemd, Slurm and
  Ctrl-C signal every process, but whether to go on is for the trainer to say. The thread that starts them has both
  blocked, loader workers inherit that, take handlers that do nothing, and only then let the signals come. (Handlers,
  and not "ignore", which programs that a dataset starts would inherit.)
- **Parents.** A loader worker dies with its trainer by the kernel's hand (PR_SET_PDEATHSIG). That means the thread that
  started it, so the same thread starts and watches them. One that is not the trainer's own child (forkserver) waits for
  the trainer's pidfd.
- **Nothing left.** Torch makes a piece of shared memory under a name, and takes the name away at once; who is killed in
  between leaves it. So the names of all that were killed are taken away. Their folder for sockets is the trainer's.

Built on the iterator of torch's DataLoader, which offers no public way to any of this.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import re
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.util import get_temp_dir
from typing import Any, NamedTuple

from torch._C import _remove_worker_pids
from torch.multiprocessing import get_sharing_strategy

from paceline.control.exit_codes import exit_words
from paceline.wire.descriptors import Fd, creating, eventfd, register

logger = logging.getLogger("paceline.data")

QUIET = (signal.SIGTERM, signal.SIGINT)
ASKED_S = 5.0  # for loader workers to end by themselves
KILLED_S = 5.0
_PR_SET_PDEATHSIG = 1
_MEMORY = "/dev/shm"
_MEMORY_NAME = re.compile(r"torch_(\d+)_")


class Death(NamedTuple):
    """A loader worker that ended by itself; `worker` is its number in the pool."""

    worker: int
    pid: int
    how: str

    def __str__(self) -> str:
        return f"loader worker {self.worker} (process {self.pid}) {self.how}"


class Pool:
    """The loader workers that `make` starts: a call of `iter` on a DataLoader. Used by one thread."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self._owner = os.getpid()
        self._is_ended = False
        self._watch = _Watch()
        answers: Any = self._watch.start(make)
        self._answers = answers
        # Torch's handler of SIGCHLD, where a DataLoader of the script's own has set it, raises for all that it knows.
        _remove_worker_pids(id(answers))
        answers._worker_pids_set = False
        _pools.add(self)

    def take(self) -> Any:
        """The next answer. Raises whatever torch does; `find_death` says whether that was a death."""
        return next(self._answers)

    def has_answer(self) -> bool:
        """Whether an answer lies there, perhaps not the next one."""
        answers = self._answers
        if self._watch.is_broken.is_set():
            return False
        return len(answers._task_info.get(answers._rcvd_idx, ())) == 2 or not answers._data_queue.empty()

    def find_death(self, wait_s: float) -> Death | None:
        """The first loader worker that ended by itself. Descriptors of a dying process break before its end is seen,
        so this waits a moment for it."""
        self._watch.is_broken.wait(wait_s)
        return self._watch.death

    def end(self) -> None:
        """No loader worker is left after this. In a forked child it does nothing: there they are not its own."""
        if self._is_ended or os.getpid() != self._owner:
            return
        self._is_ended = True
        answers = self._answers
        answers._shutdown = True  # torch's own ending would wait for locks that a killed process may hold
        try:
            if not self._watch.is_broken.is_set():
                self._watch.expect_ends()
                self._ask()
        finally:
            self._watch.kill_all()
            self._watch.stop()
            for queue in [*answers._index_queues, answers._worker_result_queue]:
                queue.cancel_join_thread()
                queue.close()

    def _ask(self) -> None:
        answers = self._answers
        if hasattr(answers, "_pin_memory_thread"):
            answers._pin_memory_thread_done_event.set()
            answers._worker_result_queue.put((None, None))
            answers._pin_memory_thread.join(ASKED_S)
        answers._workers_done_event.set()
        for queue in answers._index_queues:
            queue.put(None)
        ends_at = time.monotonic() + ASKED_S
        for process in answers._workers:
            process.join(max(0.0, ends_at - time.monotonic()))

    def kill(self) -> None:
        """For an interpreter that exits: without asking."""
        if not self._is_ended and os.getpid() == self._owner:
            self._watch.is_broken.set()
            self.end()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.end()


class _Watch:
    """The thread that starts loader workers and waits for their ends. It knows no `Pool`, so that one that is forgotten
    is found by the garbage collector."""

    def __init__(self) -> None:
        self.is_broken = threading.Event()
        self.death: Death | None = None
        self._stopping = eventfd()
        self._is_ending = False
        self._processes: list[Any] = []
        self._ends: list[Fd] = []
        self._queue: _Queue | None = None
        self._started = threading.Event()
        self._made: list[Iterator[Any]] = []
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="paceline-loader-watch", daemon=True)

    def start(self, make: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        self._make = make
        self._thread.start()
        try:
            self._started.wait()
        except BaseException:  # Ctrl-C: nobody will own what is being started
            self._started.wait()
            self.kill_all()
            self.stop()
            raise
        if self._failed:
            self._thread.join()
            self._stopping.close()
            raise self._failed[0]
        return self._made.pop()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, QUIET)  # inherited by the loader workers
        try:
            self._begin()
        except BaseException as error:
            self._failed.append(error)
        finally:
            del self._make
            self._started.set()
        if not self._failed:
            self._wait()

    def _begin(self) -> None:
        get_temp_dir()  # theirs too, then, instead of one of each that nobody removes when it is killed
        answers: Any = self._make()
        self._processes = list(answers._workers)
        with creating:
            self._ends = [Fd(os.pidfd_open(process.pid)) for process in self._processes]
            self._queue = _Queue(answers)
        self._made.append(answers)

    def _wait(self) -> None:
        poll = select.poll()
        for end in [self._stopping, *self._ends]:
            poll.register(end.fileno(), select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll()}
        if self._is_ending:
            # They end because they were asked to; this thread stays until they have, since they die with it.
            waiting = select.poll()
            waiting.register(self._stopping.fileno(), select.POLLIN)
            waiting.poll()
            return
        first = next(number for number, end in enumerate(self._ends) if end.number in ready)
        process = self._processes[first]
        code = _exit_code(process, self._ends[first])
        process.join(KILLED_S)
        self.death = Death(first, process.pid, _how(code))
        logger.warning("%s; all loader workers of this data are started again", self.death)
        self._signal_all()
        assert self._queue is not None
        self.is_broken.set()
        self._queue.close()

    def _signal_all(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError, ValueError):
                signal.pidfd_send_signal(end.fileno(), signal.SIGKILL)

    def expect_ends(self) -> None:
        """From now on, an end is what was asked for."""
        self._is_ending = True

    def kill_all(self) -> None:
        self.expect_ends()
        self._signal_all()
        for process in self._processes:
            process.join(KILLED_S)
        # By the other strategy names are in use, and a helper of torch's keeps them.
        if get_sharing_strategy() == "file_descriptor":  # type: ignore[no-untyped-call]
            _unlink_memory({process.pid for process in self._processes if process.exitcode is not None})

    def stop(self) -> None:
        """After the loader workers are gone, which die with this thread."""
        if self._stopping.number >= 0:
            os.eventfd_write(self._stopping.fileno(), 1)
        self._thread.join()
        for end in [self._stopping, *self._ends]:
            end.close()


class _Queue:
    """The trainer's side of the queue of answers. Later loader workers, of validation data for instance, inherit a copy
    of the end that is written to; without `abandon` the end of all writers would not be seen."""

    def __init__(self, answers: Any) -> None:
        self._writer = answers._worker_result_queue._writer
        self._pinned = answers._data_queue if answers._data_queue is not answers._worker_result_queue else None
        register(self)

    def close(self) -> None:
        """Whoever waits for an answer, or for the rest of one, fails."""
        with contextlib.suppress(OSError):
            self._writer.close()
        if self._pinned is not None:
            self._pinned.put(None)  # torch's thread between the two queues ends without a word to the second

    abandon = close


class Beginning:
    """The first thing that a loader worker does; `given` is the script's own `worker_init_fn`."""

    def __init__(self, given: Callable[[int], None] | None) -> None:
        self._given = given
        self._trainer = os.getpid()

    def __call__(self, worker: int) -> None:
        self._die_with_trainer()
        for number in QUIET:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, QUIET)
        if self._given is not None:
            self._given(worker)

    def _die_with_trainer(self) -> None:
        if os.getppid() == self._trainer:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._trainer:
                os._exit(1)  # it died before it could be watched
            return
        try:
            trainer = os.pidfd_open(self._trainer)
        except ProcessLookupError:
            os._exit(1)
        threading.Thread(target=_die_after, args=(trainer,), name="paceline-loader-parent", daemon=True).start()


def _unlink_memory(pids: set[int]) -> None:
    """What these processes, which are gone, have left: files with names torch_PID_..."""
    with contextlib.suppress(OSError):
        for name in os.listdir(_MEMORY):
            if (match := _MEMORY_NAME.match(name)) and int(match[1]) in pids:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{_MEMORY}/{name}")


def _die_after(process: int) -> None:
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll()
    os._exit(1)


def _nothing(_: int, __: object) -> None:
    pass


def _exit_code(process: Any, end: Fd) -> int | None:
    """Of a process that has ended. If another thread has waited for it just now, that one brings the code in a moment:
    `multiprocessing` has none until then."""
    with contextlib.suppress(ChildProcessError):
        found = os.waitid(os.P_PIDFD, end.fileno(), os.WEXITED | os.WNOWAIT)
        if found is not None:
            return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    for _ in range(100):
        if process.exitcode is not None:
            break
        time.sleep(0.001)
    return process.exitcode  # type: ignore[no-any-return]


def _how(code: int | None) -> str:
    return "ended" if code is None else exit_words(code)


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


def _kill_all() -> None:
    for pool in list(_pools):
        pool.kill()


# Before multiprocessing, which was imported earlier, asks by SIGTERM and waits without end.
atexit.register(_kill_all)
