"""The hosts, commands and processes of one run, as a user would start them; and how they are told apart.

    with Stage(schedule, folder) as stage:
        stage.start()                    paceline run on host 0, paceline join on the others
        stage.living()                   the workers that are at work
        ...

Every process that a command of the stage starts carries the stage's token in its environment. `close` kills whatever
still has it, and takes hosts and mounts down: after it nothing of the run is left, however it went.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.engine.reaper import stat_of
from paceline.testing.chaos import copies
from paceline.testing.chaos.beats import Beats, WorkerBeats
from paceline.testing.chaos.expecting import Injury, stretch
from paceline.testing.chaos.schedule import FaultKind, Schedule
from paceline.testing.faults import small_disk
from paceline.testing.netlab import Host, Netlab

TOKEN = "PACELINE_CHAOS"
NAME = "chaos"
FRESH_S = 1.0  # who has made a step within this time is at work
DISK = "48m"
_LOOK_S = 0.05
_KILLED_S = 10.0


class ChaosTimeout(Exception):
    """Something that must come did not come in time; the message is the violation."""


@dataclass
class Command:
    """A `paceline` command that was started. `workers` and `servers` are those it starts."""

    host: int
    words: tuple[str, ...]
    process: subprocess.Popen[bytes]
    output: Path
    workers: int = 0
    servers: int = 0
    code: int | None = None
    is_victim: bool = False  # whether a fault may have ended it
    expected: tuple[int, ...] = (0,)

    @property
    def is_alive(self) -> bool:
        if self.code is None:
            self.code = self.process.poll()
        return self.code is None

    def __str__(self) -> str:
        return f"paceline {' '.join(self.words[:1])} on host {self.host}"


class Past(NamedTuple):
    """The run's folder on a host that was lost, and the checkpoint on another host from which the run went on."""

    folder: Path
    checkpoint: Path


class ChaosRun:
    def __init__(self, schedule: Schedule, place: Path, patience: float = 1.0) -> None:
        self.schedule = schedule
        self._patience = patience
        self.place = place
        self.token = secrets.token_hex(8)
        self.beats = Beats(place / "beats")
        self.commands: list[Command] = []
        self.injuries: list[Injury] = []
        self.violations: list[str] = []
        self.runnable: list[tuple[float, int]] = []
        self.drained: set[int] = set()
        self.killed: set[int] = set()  # some of them may not be gone yet
        self.began = 0.0  # when all workers were at work
        self._environment: dict[str, str] = {}
        self._stack = contextlib.ExitStack()
        self._hosts: list[Host] = []
        self._numbers = list(range(schedule.num_places))  # by which the folders of hosts are named
        self._is_guests = False  # whether the run's folder is one that a guest had
        self.past: list[Past] = []
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    # -- the beginning and the end -----------------------------------------------------------------------------------

    def __enter__(self) -> ChaosRun:
        for name in ("beats", "finals", "output"):
            (self.place / name).mkdir(parents=True)
        self._environment = {TOKEN: self.token, **copies.prepare(self.place)}
        with contextlib.ExitStack() as stack:
            if self.schedule.needs_lab:
                self._hosts = stack.enter_context(Netlab(self.schedule.num_places)).hosts
            if any(fault.kind is FaultKind.DISK for fault in self.schedule.faults):
                stack.enter_context(_small_disk(self.root(0)))
            stack.callback(self._kill_everything)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _kill_everything(self) -> None:
        for command in self.commands:
            if command.is_alive:
                command.process.kill()
            command.process.wait()
        until = time.monotonic() + _KILLED_S
        while (left := self.processes()) and time.monotonic() < until:
            self.kill(*left)
            time.sleep(_LOOK_S)

    # -- commands ----------------------------------------------------------------------------------------------------

    @property
    def lab(self) -> list[Host]:
        return self._hosts

    def root(self, host: int) -> Path:
        """All that a host writes."""
        return self.place / f"host{self._numbers[host]}"

    def guests(self, host: int) -> Path:
        """The folder of runs that a host takes part in."""
        return self.root(host) / "guest"

    @property
    def runs(self) -> Path:
        """The folder of runs of host 0."""
        return self.guests(0) if self._is_guests else self.root(0)

    @property
    def folder(self) -> Path:
        """The run's own."""
        return self.runs / NAME

    def folders(self) -> list[Path]:
        """All of this run, on any host."""
        found = (self.place / f"host{number}" / where for number in self._numbers for where in (NAME, f"guest/{NAME}"))
        return [folder for folder in found if folder.is_dir()]

    def take_over(self, host: int, checkpoint: Path) -> None:
        """From now on this is host 0, and what was host 0 has its number. The run goes on from that checkpoint."""
        self.past.append(Past(self.folder, checkpoint))
        hosts, numbers = self._hosts, self._numbers
        hosts[0], hosts[host] = hosts[host], hosts[0]
        numbers[0], numbers[host] = numbers[host], numbers[0]
        self._is_guests = True

    def paceline(self, host: int, *words: str, workers: int = 0, servers: int = 0) -> Command:
        output = self.place / "output" / f"{len(self.commands)}-{words[0]}-host{host}.txt"
        environment = {**os.environ, **self._environment, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        arguments = [sys.executable, "-m", "paceline", *words]
        with output.open("wb") as file:
            options: dict[str, Any] = {
                "env": environment,
                "stdout": file,
                "stderr": subprocess.STDOUT,
                "stdin": subprocess.DEVNULL,
                "start_new_session": True,
            }
            process = (
                self._hosts[host].popen(arguments, **options) if self._hosts else subprocess.Popen(arguments, **options)
            )
        command = Command(host, words, process, output, workers, servers)
        self.commands.append(command)
        return command

    def ask(self, *words: str, timeout_s: float = 20.0) -> tuple[int, str]:
        """A command on host 0 about the run, to its end."""
        own = ("--folder", str(self.runs), "--name", NAME)
        command = self.paceline(0, *words, *own)
        self.commands.remove(command)
        try:
            self.wait_until(lambda: not command.is_alive, timeout_s, f"the end of paceline {words[0]}")
        finally:
            command.process.kill()
            command.process.wait()
        return command.process.returncode, command.output.read_text(errors="replace")

    def start_run(self, *, resume: bool = False) -> Command:
        schedule = self.schedule
        servers = schedule.servers_on(0)
        words = ["run", "--plain", "-n", str(schedule.workers), "--restarts", "1000"]
        words += ["--folder", str(self.runs), "--name", NAME]
        words += ["--listen", self._hosts[0].address] if self._hosts else []
        words += ["--servers", str(servers), "--replicas", str(schedule.replicas)] if servers else []
        words += ["--resume"] if resume else []
        return self.paceline(0, *words, *self.script(), workers=schedule.workers, servers=servers)

    def start_join(self, host: int, code: str, *, workers: int, servers: int = 0) -> Command:
        own = self.guests(host)
        folder = own if own != self.runs else own.with_name("beside")
        words = ["join", code, "-n", str(workers), "--restarts", "1000", "--folder", str(folder)]
        words += ["--servers", str(servers)] if servers else []
        return self.paceline(host, *words, *(self.script() if workers else ()), workers=workers, servers=servers)

    def script(self) -> tuple[str, ...]:
        schedule = self.schedule
        module = "paceline.testing.chaos.training"
        return ("-m", module, str(self.place), schedule.mode, str(schedule.loaders), str(schedule.evaluates))

    def invite(self, uses: int = 1) -> str:
        """A code; the coordinator may be on its way back, so it is asked again."""
        until = time.monotonic() + 20.0
        while True:
            code, text = self.ask("invite", "--uses", str(uses))
            if code == 0:
                return text.split()[-1]
            if time.monotonic() > until:
                raise ChaosTimeout(f"paceline invite fails (exit code {code}): {text.strip()}")
            time.sleep(0.5)

    # -- who there is ------------------------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """The living processes of the run, with their command lines; the commands of the stage included."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{TOKEN}={self.token}".encode() not in (entry / "environ").read_bytes():
                        continue
                    if is_alive(int(entry.name)):
                        line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                        found[int(entry.name)] = line
        return found

    def living(self) -> list[WorkerBeats]:
        """The workers whose processes live and that have made a step, the longest-living first."""
        workers = [worker for worker in self.beats.look().values() if worker.steps and worker.end_code is None]
        living = [worker for worker in workers if worker.pid not in self.killed and is_alive(worker.pid)]
        return sorted(living, key=lambda one: one.started)

    def at_work(self) -> list[WorkerBeats]:
        now = time.monotonic()
        return [worker for worker in self.living() if now - worker.steps[-1] < FRESH_S]

    def host_of(self, pid: int) -> int:
        """-1 if the process is gone."""
        if not self._hosts:
            return 0
        with contextlib.suppress(OSError):
            there = os.stat(f"/proc/{pid}/ns/net").st_ino
            for number, host in enumerate(self._hosts):
                if os.stat(f"/run/netns/{host.name}").st_ino == there:
                    return number
        return -1

    def workers_on(self, host: int) -> list[WorkerBeats]:
        return [worker for worker in self.living() if self.host_of(worker.pid) == host]

    def coordinator(self) -> int | None:
        return next((pid for pid, line in self.processes().items() if "paceline.control.shell.service" in line), None)

    def servers(self) -> list[int]:
        return sorted(pid for pid, line in self.processes().items() if "-m paceline.server" in line)

    def loaders(self) -> list[int]:
        """The loader workers: children of workers."""
        parents = {worker.pid for worker in self.living()}
        return sorted(pid for pid in self.processes() if parent_of(pid) in parents)

    def entering(self) -> list[Command]:
        """Those who join and have started nothing yet."""
        parents = {parent_of(pid) for pid in self.processes()}
        joins = (command for command in self.commands if command.words[0] == "join" and command.is_alive)
        return [command for command in joins if command.process.pid not in parents]

    @property
    def run(self) -> Command:
        """The last `paceline run`."""
        return next(command for command in reversed(self.commands) if command.words[0] == "run")

    def num_wanted(self) -> int:
        """How many workers should be at work by now."""
        agents = [command for command in self.commands if command.is_alive]
        return max(1, sum(command.workers for command in agents) - len(self.drained))

    # -- signals -----------------------------------------------------------------------------------------------------

    def kill(self, *pids: int) -> None:
        self.killed.update(pids)
        self.send(signal.SIGKILL, *pids)

    def send(self, number: signal.Signals, *pids: int) -> None:
        """To those that still live."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, what: str | Callable[[], str]) -> Any:
        """`ChaosTimeout` if it takes longer, on a machine that is not busy, or if the run ends meanwhile."""
        began = time.monotonic()
        while not (found := condition()):
            self.tick()
            if time.monotonic() - began > timeout_s * self.stretch_since(began):
                raise ChaosTimeout(f"{what if isinstance(what, str) else what()}: not within {timeout_s:g} s")
            time.sleep(_LOOK_S)
        return found

    def later(self, at: float, action: Callable[[], None]) -> None:
        """Do this at that time, whatever is being waited for then."""
        heapq.heappush(self._later, (at, len(self.runnable), action))

    @property
    def has_later(self) -> bool:
        return bool(self._later)

    def tick(self) -> None:
        """Do what is due, and note how busy the machine is; called while anything is waited for."""
        while self._later and self._later[0][0] <= time.monotonic():
            heapq.heappop(self._later)[2]()
        running = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        self.runnable.append((time.monotonic(), int(running)))

    def stretch_since(self, began: float, until: float = float("inf")) -> float:
        """By how much all bounds are longer in this time."""
        runnable = [number for time, number in self.runnable if began <= time <= until]
        return self._patience * stretch(runnable, os.cpu_count() or 1)


@contextlib.contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """What is on it then stays in the folder."""
    keep = folder.with_name(f"{folder.name}-kept")
    try:
        with small_disk(folder, DISK):
            try:
                yield
            finally:
                subprocess.run(["cp", "-a", str(folder), str(keep)], check=False)
    finally:
        folder.rmdir()
        keep.rename(folder)


def is_alive(pid: int) -> bool:
    return (stat := stat_of(pid)) is not None and stat.is_alive


def parent_of(pid: int) -> int:
    return stat.parent if (stat := stat_of(pid)) is not None else 0
