"""The processes of one library: started once, idle in a blocking read while another library is measured."""

from __future__ import annotations

import selectors
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn, TypeVar

from paceline.cli.bench.allreduce import sessions
from paceline.cli.bench.allreduce.libraries import BenchLibrary, environment_of
from paceline.cli.bench.allreduce.messages import (
    Channel,
    FormOrder,
    MeasureOrder,
    Order,
    RankFailed,
    RankReady,
    RankTimes,
    Reply,
    StopOrder,
    to_worker,
)
from paceline.cli.bench.errors import BenchError

FORM_WAIT_S = 120.0
MEASURE_WAIT_S = 300.0
_LEAVE_WAIT_S = 10.0
_GRACE_S = 3.0
_ACCEPT_EVERY_S = 0.1
_LINES_SHOWN = 12
_LONGEST_SOCKET_PATH = 107  # of a Unix socket on Linux, in bytes

Wanted = TypeVar("Wanted", RankReady, RankTimes)


class RankCrew:
    """All ranks of one library. Call `start`, `form`, then `measure` as often as wanted; `close` ends all.

    Any failure ends every process of the crew before it is raised as a `BenchError`.
    """

    def __init__(self, library: BenchLibrary, *, num_ranks: int, num_threads: int, folder: Path) -> None:
        self.library = library
        self.version = ""
        self._num_ranks = num_ranks
        self._num_threads = num_threads
        self._folder = folder
        self._open = ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []
        self._channels: list[Channel[Reply]] = []
        self._listener: socket.socket

    def start(self) -> None:
        """Starts the processes and returns at once; they import what they need while others start."""
        path = self._folder / f"{self.library.name}.sock"
        if len(str(path).encode()) > _LONGEST_SOCKET_PATH:
            raise BenchError(f"the temporary folder {self._folder} has too long a name; set TMPDIR to a shorter one")
        self._listener = self._open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(str(path))
        self._listener.listen(self._num_ranks)
        module = [sys.executable, "-m", "paceline.cli.bench.allreduce.worker"]
        worker = [*module, "--socket", str(path), "--driver", self.library.driver]
        if self.library.launcher:
            self._start_process([*self.library.launcher, str(self._num_ranks), *worker])
        else:
            for rank in range(self._num_ranks):
                self._start_process([*worker, "--rank", str(rank)])

    def form(self) -> None:
        """Waits until every rank is there and has joined the others."""
        deadline = time.monotonic() + FORM_WAIT_S
        while len(self._channels) < self._num_ranks:
            self._accept(deadline)
        rendezvous = self._open.enter_context(self.library.rendezvous(self._num_ranks, self._folder))
        self._tell_all(FormOrder(rendezvous=rendezvous, num_ranks=self._num_ranks, num_threads=self._num_threads))
        ready = self._answers(RankReady, FORM_WAIT_S)
        if any(answer.num_ranks != self._num_ranks for answer in ready):
            self._fail(f"its ranks formed a world of {ready[0].num_ranks} instead of {self._num_ranks}")
        self.version = ready[0].version

    def measure(self, order: MeasureOrder) -> list[RankTimes]:
        """What every rank measured."""
        self._tell_all(order)
        return self._answers(RankTimes, MEASURE_WAIT_S)

    def close(self, *, in_peace: bool = True) -> None:
        """Lets the ranks leave the group, or hangs up on them, and ends what is left. May be called twice."""
        try:
            if in_peace:
                with suppress(OSError):
                    for channel in self._channels:
                        channel.send(StopOrder())
            else:
                self._hang_up()
            # A worker ends when the bench hangs up, its launcher after it: time to say why and to clean up.
            wait_s = _LEAVE_WAIT_S if in_peace else _GRACE_S
            sessions.end(self._processes, wait_s=wait_s, grace_s=_GRACE_S)
        finally:
            self._hang_up()
            self._open.close()

    def __enter__(self) -> RankCrew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        self.close(in_peace=kind is None)

    def _start_process(self, command: list[str]) -> None:
        log = self._folder / f"{self.library.name}.{len(self._logs)}.log"
        environment = environment_of(self.library, num_threads=self._num_threads, folder=self._folder)
        self._logs.append(log)
        try:
            self._processes.append(sessions.start(command, environment=environment, output=log))
        except OSError as error:
            raise BenchError(f"{self.library.name}: cannot start {command[0]}: {error}") from error

    def _accept(self, deadline: float) -> None:
        self._listener.settimeout(_ACCEPT_EVERY_S)
        try:
            connection, _ = self._listener.accept()
        except TimeoutError:
            if any(process.poll() is not None for process in self._processes):
                self._fail("a worker ended while it started")
            if time.monotonic() > deadline:
                self._fail(f"not all ranks came within {FORM_WAIT_S:.0f} s")
            return
        connection.settimeout(MEASURE_WAIT_S)
        self._channels.append(to_worker(connection))

    def _tell_all(self, order: Order) -> None:
        try:
            for channel in self._channels:
                channel.send(order)
        except OSError:
            self._fail("a worker is gone")

    def _answers(self, wanted: type[Wanted], wait_s: float) -> list[Wanted]:
        """One answer of every rank as they come: one that died must not hide behind one that hangs."""
        deadline = time.monotonic() + wait_s
        answers: list[Wanted] = []
        with selectors.DefaultSelector() as selector:
            for channel in self._channels:
                selector.register(channel, selectors.EVENT_READ, channel)
            while selector.get_map():
                arrived = selector.select(max(0.0, deadline - time.monotonic()))
                if not arrived:
                    self._fail(f"{len(selector.get_map())} of its ranks gave no answer within {wait_s:.0f} s")
                for key, _ in arrived:
                    answer = self._answer(key.data)
                    if isinstance(answer, wanted):
                        answers.append(answer)
                        selector.unregister(key.fileobj)
        return answers

    def _answer(self, channel: Channel[Reply]) -> Reply | None:
        try:
            answer = channel.pump()
        except (EOFError, OSError):
            self._fail("a worker died")
        if isinstance(answer, RankFailed):
            self._fail(answer.message)
        return answer

    def _fail(self, reason: str) -> NoReturn:
        """Ends the crew and says why, with the last lines its processes wrote."""
        killed = self._killed_rank()
        self.close(in_peace=False)
        lines = [f"{self.library.name}: {killed or reason}"]
        for index, log in enumerate(self._logs):
            tail = log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:] if log.exists() else []
            origin = self.library.name if self.library.launcher else f"{self.library.name} rank {index}"
            lines += [f"  [{origin}] {line}" for line in tail]
        raise BenchError("\n".join(lines))

    def _killed_rank(self) -> str:
        """The rank that a signal ended: the origin, where the others only report that it is gone."""
        if self.library.launcher:
            return ""
        for rank, process in enumerate(self._processes):
            # Its sockets close a moment before its exit can be seen.
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(timeout=_ACCEPT_EVERY_S)
                if code < 0:
                    return f"rank {rank} was ended by {signal.Signals(-code).name}"
        return ""

    def _hang_up(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels.clear()
