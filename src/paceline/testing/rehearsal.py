"""A real run in real processes, for tests and benchmarks: a coordinator, workers that run a function, and servers.

    with Rehearsal(train, workers=3, folder=tmp_path) as run:
        run.wait_said(0, 5)                      # what the function says (`say`), here after each step
        run.kill(1)                              # or stop, resume, terminate; kill_coordinator, start_coordinator
        run.add()                                # one more worker; add_server, and run.servers[0].kill()
        results = run.finish()                   # by worker: what the function returned, or a `Died`

It does what an agent does, in the test's own process: it sees deaths and who is busy, reports that, and kills whom it
is told to. Workers are forked from a process that has imported torch already; they end as a script does, by its
exception hook and exit functions. Servers run what `python -m paceline.server` runs, as many as the settings say. What
they and the coordinator write is in the folder (`log`, `server_log`). A folder in which a run has ended is opened
again, as `paceline run --resume` does.

Invariant: after `close` no process of the run is left.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from paceline.control.exit_codes import exit_words
from paceline.control.journal.journal import DATABASE
from paceline.control.journal.reader import RunReader
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.messages.agents import AgentDirective, ProcessVitals
from paceline.control.shell import config as configs
from paceline.control.shell import ticket as tickets
from paceline.control.shell.client import AgentClient, command
from paceline.control.shell.config import Config
from paceline.control.shell.ticket import Ticket
from paceline.engine import folders
from paceline.engine.reaper import stat_of
from paceline.placement.placement import Placement
from paceline.testing.account import account_of
from paceline.testing.forking import fork_context
from paceline.wire.card import this_host
from paceline.wire.deadline import Deadline
from paceline.wire.decoding import decode
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

_PATIENCE_S = 60.0
_BUSY_S = 0.5  # who has used the processor within this time is busy


class Died(NamedTuple):
    """A worker that did not return: its exit code, and its traceback if it raised."""

    code: int | None
    error: str = ""


class Child:
    """A process of the run."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.pid: int = process.pid
        self.ticks = 0  # of processor time, when it was looked at last
        self.busy_at = time.monotonic()
        self._exit_lock = threading.Lock()

    @property
    def exit_code(self) -> int | None:
        """None while it lives. Its code can be read once: the second of two threads would get 255 in its place."""
        with self._exit_lock:
            code: int | None = self.process.exitcode
            return code

    def look(self) -> ProcessVitals:
        """What can be seen of its process."""
        stat, now = stat_of(self.pid), time.monotonic()
        if stat is None:
            return ProcessVitals("X", False)
        if stat.cpu_ticks > self.ticks:
            self.ticks, self.busy_at = stat.cpu_ticks, now
        return ProcessVitals(stat.state, now - self.busy_at < _BUSY_S)

    def send(self, number: signal.Signals) -> None:
        """A signal, if the process is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()


class RehearsalWorker(Child):
    def __init__(self, process: Any, pipe: Connection) -> None:
        super().__init__(process)
        self.pipe = pipe
        self.said: list[Any] = []
        self.result: Any = None
        self.has_result = False

    def close(self) -> None:
        super().close()
        self.pipe.close()


class Rehearsal:
    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        workers: int,
        folder: Path,
        settings: RunSettings | None = None,
        name: str = "rehearsal",
        prepare_server: Callable[[int], None] | None = None,
    ) -> None:
        """`prepare_server` is called in the process of each server, with its number, before it begins."""
        self._function = function
        self._arguments = arguments
        self._prepare_server = prepare_server
        self.folder = folder
        self._context = fork_context()
        self._identity = Identity()
        self._config = Config.new(
            run=name, folder=folder, settings=settings or RunSettings(wanted=workers, fewest=1), port=0
        )
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._exits: dict[int, str] = {}
        self._seen: tuple[object, ...] = ()
        self.exhausted = False  # whether no more workers will be added
        self.workers: list[RehearsalWorker] = []
        self.servers: list[Child] = []
        if (folder / DATABASE).exists():
            folders.reopen(folder)
        self.start_coordinator()
        self.ticket = self._find_ticket()
        mine = Credentials(self._identity, self.ticket.secret, "agent")
        self._client = AgentClient(self.ticket, mine, self._obey)
        self._watcher = threading.Thread(target=self._watch, name="rehearsal", daemon=True)
        self._watcher.start()
        for _ in range(self._config.settings.servers):
            self.add_server()
        for _ in range(workers):
            self.add()

    def _find_ticket(self) -> Ticket:
        """The one of this coordinator: an earlier run of the folder may have left its own."""
        path = self.folder / tickets.ACCESS_FILE

        def find() -> Ticket | None:
            try:
                access = msgspec.json.decode(path.read_bytes(), type=tickets.Access)
            except FileNotFoundError:
                return None
            return access.ticket if access.pid == self.coordinator.pid else None

        ticket: Ticket = self.wait_for(find)
        return msgspec.structs.replace(ticket, agent=self._identity.member, host=this_host())

    # -- workers -----------------------------------------------------------------------------------------------------

    def add(self) -> RehearsalWorker:
        """One more worker."""
        ours, theirs = self._context.Pipe()
        arguments = (theirs, msgspec.json.encode(self.ticket), self._function, self._arguments)
        number = len(self.workers)
        process = self._context.Process(target=_work, args=(*arguments, number, str(self._log_of(number))))
        process.start()
        theirs.close()
        worker = RehearsalWorker(process, ours)
        with self._lock:
            self.workers.append(worker)
        self._report()
        return worker

    def add_server(self, capacity: float = 0.0, *, cold: bool = False) -> Child:
        """One more server; without a capacity it is one like any other. A `cold` one is started as an agent starts it,
        by an interpreter that has imported nothing yet."""
        number = len(self.servers)
        ticket = msgspec.structs.replace(self.ticket, capacity=capacity)
        arguments = (msgspec.json.encode(ticket), str(self._server_log_of(number)), number, self._prepare_server)
        context = multiprocessing.get_context("spawn") if cold else self._context
        process = context.Process(target=_serve, args=arguments)
        process.start()
        server = Child(process)
        with self._lock:
            self.servers.append(server)
        self._report()
        return server

    def kill(self, number: int) -> None:
        os.kill(self.workers[number].pid, signal.SIGKILL)

    def stop(self, number: int) -> None:
        os.kill(self.workers[number].pid, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.workers[number].pid, signal.SIGCONT)

    def terminate(self, number: int) -> None:
        os.kill(self.workers[number].pid, signal.SIGTERM)

    def kill_coordinator(self) -> None:
        self.coordinator.kill()
        self.coordinator.wait()

    def start_coordinator(self) -> None:
        with (self.folder / "coordinator.log").open("ab") as log:
            self.coordinator = configs.launch(self._config, stdout=log, stderr=log)

    def ask(self, operation: str, arguments: Any = None) -> Any:
        return command(self.ticket, operation, arguments, answer_type=Any, deadline=Deadline(10.0, operation))

    # -- looking -----------------------------------------------------------------------------------------------------

    def reader(self) -> RunReader:
        return RunReader(self.folder)

    def events(self, kind: str) -> list[str]:
        """What run.db says of events of a kind."""
        with self.reader() as reader:
            return [event.text for event in reader.events() if event.kind == kind]

    def members(self) -> dict[int, str]:
        """The id of the member that each worker is, by the number of the worker; in order of rank."""
        numbers = {worker.pid: number for number, worker in enumerate(self.workers)}
        living = [row for row in self.ask("status")["members"] if not row["fate"] and row["pid"] in numbers]
        return {numbers[row["pid"]]: row["member"] for row in sorted(living, key=lambda row: int(row["rank"]))}

    def placement(self) -> Placement:
        """Where the ranges of the parameters are, as the coordinator remembers it."""
        database = sqlite3.connect(f"file:{self.folder / DATABASE}?mode=ro", uri=True, timeout=10.0)
        with contextlib.closing(database):
            row = database.execute("SELECT value FROM remembered WHERE key = 'placement'").fetchone()
        return Placement() if row is None else decode(row[0], Placement)

    def is_settled(self, servers: Sequence[int]) -> bool:
        """Whether the ranges are on these servers, as many times as they should be, and none is on its way."""
        pids = {self.servers[number].pid for number in servers}
        with self.reader() as reader:  # the coordinator may be on its way back
            wanted = {row.member for row in reader.members() if row.pid in pids}
        placement = self.placement()
        num_backups = min(self._config.settings.replicas, len(servers)) - 1
        at_rest = (len(one.backups) == num_backups and not one.joining and not one.handing for one in placement.ranges)
        is_known = len(wanted) == len(pids)  # one that has just been started is not
        return is_known and placement.card_of.keys() == wanted and bool(placement.ranges) and all(at_rest)

    def log(self, number: int) -> str:
        """What a worker has written to its standard output and error."""
        return self._log_of(number).read_text(errors="replace")

    def server_log(self, number: int) -> str:
        return self._server_log_of(number).read_text(errors="replace")

    def _server_log_of(self, number: int) -> Path:
        return self.folder / f"server-{number}.log"

    def _log_of(self, number: int) -> Path:
        return self.folder / f"worker-{number}.log"

    def said(self, number: int) -> list[Any]:
        """What a worker has said so far."""
        with self._lock:
            self._collect(self.workers[number])
            return list(self.workers[number].said)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = _PATIENCE_S) -> Any:
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            with self._lock:
                for worker in list(self.workers):
                    self._collect(worker)  # or a worker that says much stands still, and the others with it
            if time.monotonic() > deadline:
                self._show_stacks()
                raise TimeoutError(f"waited {timeout_s} s in vain; {self.describe()}\n{account_of(self.folder)}")
            time.sleep(0.005)
        return found

    def _show_stacks(self) -> None:
        """Let every process write where it stands into its log."""
        for child in (*self.workers, *self.servers):
            if child.exit_code is None:
                child.send(signal.SIGUSR1)
        time.sleep(0.5)

    def wait_said(self, number: int, count: int, timeout_s: float = _PATIENCE_S) -> None:
        self.wait_for(lambda: len(self.said(number)) >= count or self.workers[number].has_result, timeout_s)

    def describe(self) -> str:
        return "; ".join(
            f"worker {number}: pid {worker.pid} exit {worker.exit_code} said {worker.said[-1:]}"
            for number, worker in enumerate(self.workers)
        )

    def finish(self, numbers: Sequence[int] | None = None, timeout_s: float = _PATIENCE_S) -> list[Any]:
        """What the workers returned; a `Died` for each that did not."""
        chosen = range(len(self.workers)) if numbers is None else numbers
        self.wait_for(lambda: all(self._is_done(self.workers[number]) for number in chosen), timeout_s)
        return [self._result_of(self.workers[number]) for number in chosen]

    def _is_done(self, worker: RehearsalWorker) -> bool:
        with self._lock:
            self._collect(worker)
            return worker.exit_code is not None

    def _result_of(self, worker: RehearsalWorker) -> Any:
        self._collect(worker)
        return worker.result if worker.has_result else Died(worker.exit_code)

    def _collect(self, worker: RehearsalWorker) -> None:
        with contextlib.suppress(EOFError, OSError):
            while worker.pipe.poll():
                kind, value = worker.pipe.recv()
                if kind == "said":
                    worker.said.append(value)
                else:
                    worker.result, worker.has_result = value, True

    # -- the agent's part --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                living = [child for child in (*self.workers, *self.servers) if child.pid not in self._exits]
            wait([child.process.sentinel for child in living], timeout=0.05)
            for child in living:
                if (code := child.exit_code) is not None:
                    self._exits[child.pid] = exit_words(code)
            self._report()

    def _report(self) -> None:
        with self._lock:
            everybody = (*self.workers, *self.servers)
            living = {child.pid: child.look() for child in everybody if child.pid not in self._exits}
            servers = tuple(server.pid for server in self.servers if server.pid in living)
            seen = (living, dict(self._exits), self.exhausted, servers)
            if seen != self._seen:
                self._seen = seen
                self._client.update(*seen)

    def _obey(self, directive: AgentDirective) -> None:
        for pid in directive.kill:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._closing.set()
        self._watcher.join()
        self._client.close(0.0)  # the coordinator is killed below: nothing is left to be said
        for child in (*self.workers, *self.servers):
            child.close()
        self.coordinator.kill()
        self.coordinator.wait()

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_mouth: list[Connection] = []
_numbers: list[int] = []


def is_here() -> bool:
    """Whether this process is a worker of a rehearsal."""
    return bool(_numbers)


def worker_number() -> int:
    """Which worker of the rehearsal this process is."""
    return _numbers[0]


def say(value: Any) -> None:
    """Tell the test something from inside a worker."""
    _mouth[0].send(("said", value))


def _work(
    pipe: Connection, ticket: bytes, function: Callable[..., Any], arguments: tuple[Any, ...], number: int, log: str
) -> None:
    import torch

    torch.set_num_threads(1)
    _mouth[:] = [pipe]
    _numbers[:] = [number]
    _equip(ticket, log)
    multiprocessing.set_start_method("fork", force=True)  # as in a script; here it would be as the server's
    code = 0
    try:
        pipe.send(("result", function(*arguments)))
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        code = 1
        pipe.send(("result", Died(1, traceback.format_exc())))
        sys.excepthook(type(error), error, error.__traceback__)
    threading._shutdown()  # type: ignore[attr-defined]  # these two are what an interpreter does at its end
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(ticket: bytes, log: str, number: int, prepare: Callable[[int], None] | None) -> None:
    import torch

    from paceline.server.__main__ import main

    torch.set_num_threads(1)
    _equip(ticket, log)
    if prepare is not None:
        prepare(number)
    sys.exit(main())


def _equip(ticket: bytes, log: str) -> None:
    """What whoever starts a member gives it: a place for its output, and its ticket."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    descriptor = tickets.hand_over(msgspec.json.decode(ticket, type=Ticket))
    os.environ[tickets.VARIABLE] = str(descriptor)
