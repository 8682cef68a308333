"""The local engine: workers and servers are processes of this machine, each the leader of a session of its own.

A process gets its ticket as an inherited descriptor, and shares that descriptor's position with the agent: when it has
moved, the ticket was read, and the script has a session. Nothing else is needed to tell a plain script from one that
is part of the run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from paceline.control.messages.agents import ProcessVitals
from paceline.control.shell import ticket as tickets
from paceline.control.shell.ticket import Ticket
from paceline.engine import reaper
from paceline.engine.base import EngineError
from paceline.engine.output import Output, Printed
from paceline.engine.reaper_handle import ReaperHandle, guarded
from paceline.engine.slots import label_of
from paceline.wire.descriptors import Fd

RUN_VARIABLE = "PACELINE_RUN"
SERVER_COMMAND = ("-m", "paceline.server")


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker gets beside its ticket: descriptors, by the variable that tells it their number, and variables."""

    descriptors: dict[str, int] = {}
    environment: dict[str, str] = {}


Attach = Callable[[int], Attached]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one agent run. `command` is what comes after the interpreter. What is started in the slots
    after theirs are servers, which have a command of their own."""

    command: tuple[str, ...]
    workers: int
    run: str
    ranked: bool = True  # whether slots are the ranks of a whole: not where workers join those of another host
    environment: dict[str, str] = {}

    def is_server(self, slot: int) -> bool:
        return slot >= self.workers

    def command_of(self, slot: int) -> tuple[str, ...]:
        return SERVER_COMMAND if self.is_server(slot) else self.command

    def environment_of(self, slot: int, base: Mapping[str, str], port: int) -> dict[str, str]:
        """For a process in this slot; scripts written for torchrun find what they expect."""
        cores = len(os.sched_getaffinity(0))
        own = {
            RUN_VARIABLE: self.run,
            "PYTHONUNBUFFERED": "1",  # what was printed before a crash is not lost
        }
        if not self.is_server(slot):
            own |= {"LOCAL_RANK": str(slot), "LOCAL_WORLD_SIZE": str(self.workers)}
        if self.ranked and not self.is_server(slot):
            own |= {
                "RANK": str(slot),
                "WORLD_SIZE": str(self.workers),
                "GROUP_RANK": "0",
                "GROUP_WORLD_SIZE": "1",
                "ROLE_NAME": "default",
                "ROLE_RANK": str(slot),
                "ROLE_WORLD_SIZE": str(self.workers),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                # By this name programs know that their processes were started for them, and start none. They are never
                # started again as a whole.
                "TORCHELASTIC_RUN_ID": self.run,
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
            }
        threads = {"OMP_NUM_THREADS": str(max(1, cores // max(1, self.workers)))}
        return {**threads, **base, **own, **self.environment}


class LocalProcess:
    """Owns the process, its pipes' log and the agent's view of its ticket."""

    def __init__(
        self, popen: subprocess.Popen[bytes], ticket: Fd, printed: Printed, close: Callable[[LocalProcess], None]
    ) -> None:
        self._popen = popen
        self._ticket = ticket
        self.printed = printed
        self._close = close
        self._exit = Fd(os.pidfd_open(popen.pid))
        self._cpu_ticks = 0

    @property
    def label(self) -> str:
        return self.printed.label

    @property
    def pid(self) -> int:
        return self._popen.pid

    def fileno(self) -> int:
        return self._exit.fileno()

    def exit_code(self) -> int | None:
        if self._popen.returncode is not None:
            return self._popen.returncode
        # It is not reaped before `close`: until then no other process can get its number.
        seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if seen is None:
            return None
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def vitals(self) -> ProcessVitals:
        stat = reaper.stat_of(self.pid)
        if stat is None:
            return ProcessVitals("X", False)
        busy, self._cpu_ticks = stat.cpu_ticks > self._cpu_ticks, stat.cpu_ticks
        return ProcessVitals(stat.state, busy)

    def has_session(self) -> bool:
        return os.lseek(self._ticket.fileno(), 0, os.SEEK_CUR) > 0

    def signal(self, number: int) -> None:
        with contextlib.suppress(OSError):
            # What it has started is asked by it, not by us; but it stands still, goes on and dies as a whole.
            if number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def last_lines(self) -> list[str]:
        return list(self.printed.error_lines or self.printed.all_lines)

    def close(self) -> None:
        reaper.kill_session(self.pid)
        self._popen.wait()
        self._exit.close()
        self._ticket.close()
        self._close(self)


class LocalEngine:
    """Used by the agent's thread, which must live as long as the processes: they die with it. `attach` says
    what the process in a worker's slot gets; it is asked at each start."""

    def __init__(
        self, job: Job, ticket: Ticket, logs: Path, output: Output, reaper: ReaperHandle, attach: Attach | None = None
    ) -> None:
        self._job = job
        self._ticket = ticket
        self._logs = logs
        self._output = output
        self._reaper = reaper
        self._attach = attach or _nothing_else
        self._port = free_port()

    def start(self, slot: int) -> LocalProcess:
        with contextlib.ExitStack() as stack:
            ticket = Fd(tickets.hand_over(self._ticket))
            stack.callback(ticket.close)
            os.lseek(ticket.fileno(), 0, os.SEEK_SET)
            label, is_server = label_of(slot, self._job.workers), self._job.is_server(slot)
            pipes = self._output.open(label, self._logs / f"{label}.log")
            attached = _nothing_else(slot) if is_server else self._attach(slot)
            environment = self._job.environment_of(slot, os.environ, self._port)
            environment |= attached.environment
            environment |= {variable: str(descriptor) for variable, descriptor in attached.descriptors.items()}
            try:
                popen = subprocess.Popen(
                    guarded([sys.executable, *self._job.command_of(slot)], os.getpid()),
                    env=tickets.environment_for(ticket.fileno(), base=environment),
                    pass_fds=[ticket.fileno(), *attached.descriptors.values()],
                    stdin=subprocess.DEVNULL,
                    stdout=pipes.out,
                    stderr=pipes.error,
                    start_new_session=True,
                )
            except OSError as error:
                self._output.finish(pipes.printed)
                fewer = "servers (--servers)" if is_server else "workers (-n)"
                raise EngineError(f"{label} cannot be started: {error}; start fewer {fewer}") from error
            finally:
                os.close(pipes.out)
                os.close(pipes.error)
            stack.pop_all()
        self._reaper.entrust(popen.pid)
        pipes.printed.write(f"--- process {popen.pid}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        return LocalProcess(popen, ticket, pipes.printed, self._closed)

    def _closed(self, process: LocalProcess) -> None:
        self._output.finish(process.printed)
        self._reaper.forget(process.pid)

    def close(self) -> None:
        """Processes are closed one by one; there is nothing else."""


def _nothing_else(_: int) -> Attached:
    return Attached()


def free_port() -> int:
    """A port that nobody uses just now, for scripts that open one of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
