"""A run from its first process to its last: what `paceline run`, `paceline join` and `launch` have in common.

with Lifetime(...) as life:       output, reaper and log of one agent
    outcome = life.host(...)      be the run's own agent, with its coordinator
    outcome = life.join(...)      be an agent of a run that lives elsewhere
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from paceline.control.exit_codes import LOST, UNSAVED
from paceline.control.journal.disk import Cosmetic
from paceline.control.journal.journal import DATABASE, JournalError
from paceline.control.journal.labels import LABELS_FILE
from paceline.control.journal.reader import RunReader
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell.client import way_to_custody
from paceline.control.shell.config import Config
from paceline.control.shell.ticket import Ticket
from paceline.custody import names
from paceline.custody.depot import Depot
from paceline.engine import causes, shipping
from paceline.engine.agent import Agent
from paceline.engine.base import Engine, Process
from paceline.engine.child import CoordinatorChild, ticket_of
from paceline.engine.events import RunOutcome, RunResult
from paceline.engine.folders import ClaimedFolder
from paceline.engine.local import Attach, Job, LocalEngine
from paceline.engine.output import Output
from paceline.engine.reaper_handle import ReaperHandle
from paceline.engine.slots import AgentRules
from paceline.engine.speeds import Capacity
from paceline.engine.supervisor import FINISHED, Supervisor
from paceline.engine.terminal import Terminal
from paceline.watch import losses as shortfalls
from paceline.watch.losses import Shortfall
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("paceline.engine")

AGENT_LOG = "agent.log"
NO_LIMIT = 1 << 30

MakeEngine = Callable[[Ticket, Output, ReaperHandle], Engine]


class Hosting(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is hosted; the fields are the options of `paceline run`."""

    workers: int
    fewest: int = 1
    most: int = NO_LIMIT
    host: str = "127.0.0.1"
    restarts: int = 3
    strict: bool = False
    shares: tuple[int, ...] = ()
    drop_stragglers: bool = False
    capacity: Capacity = Capacity()
    servers: int = 0
    replicas: int = 1
    by_load: bool = True

    def settings(self) -> RunSettings:
        # A list of fixed shares has one for each worker; those of workers that join later must be asked for (--max).
        most = self.workers if len(self.shares) > 1 and self.most == NO_LIMIT else self.most
        return RunSettings(
            wanted=self.workers,
            fewest=self.fewest,
            most=most,
            shares=self.shares,
            drop_stragglers=self.drop_stragglers,
            servers=self.servers,
            replicas=self.replicas,
            by_load=self.by_load,
        )


class Display:
    """What a person sees of the run beside the lines of its processes; shown from the first session on."""

    def __init__(self, folder: Path, *, plain: bool) -> None:
        from rich.console import Console

        self._folder = folder
        self._console = Console(stderr=True)
        self._plain = plain or not self._console.is_terminal or self._console.is_dumb_terminal
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def console(self) -> Console | None:
        """Where everything else must be printed too, if this draws."""
        return None if self._plain else self._console

    def show(self) -> None:
        from paceline.watch.display import watch

        def look_on() -> None:
            watch(self._folder, self._stop, plain=self._plain, console=self._console)

        self._thread = threading.Thread(target=look_on, name="paceline-display", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10.0)


class Lifetime:
    """One agent's life in a claimed folder. `display` may be None."""

    def __init__(self, place: ClaimedFolder, display: Display | None = None) -> None:
        self.place = place
        self._display = display
        self._stack = contextlib.ExitStack()
        self._agent: Agent | None = None
        self._coordinator: CoordinatorChild | None = None

    def __enter__(self) -> Lifetime:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_logged_to(self.place.logs / AGENT_LOG))
            terminal = Terminal(self._display.console if self._display is not None else None)
            self._output = Output(terminal.show)
            self._labels = Cosmetic(self.place.folder / LABELS_FILE, "the names of its processes", self._output.say)
            stack.callback(self._output.close)
            self._reaper = ReaperHandle()
            stack.callback(self._reaper.close)
            if self._display is not None:
                stack.callback(self._display.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def host(self, hosting: Hosting, make_engine: MakeEngine) -> RunOutcome:
        rules = AgentRules(
            workers=hosting.workers, servers=hosting.servers, restarts=hosting.restarts, strict=hosting.strict
        )
        config = Config.new(
            run=self.place.name,
            folder=self.place.folder,
            settings=hosting.settings(),
            host=hosting.host,
            resumed=self.place.is_resumed,
        )
        identity = Identity()
        ticket = msgspec.structs.replace(ticket_of(config, identity.member), capacity=hosting.capacity.declared)
        self._coordinator = CoordinatorChild(config, identity.member, self.place.logs, self._reaper)
        return self._run(rules, ticket, identity, make_engine)

    def join(self, ticket: Ticket, rules: AgentRules, capacity: Capacity, make_engine: MakeEngine) -> RunOutcome:
        """With the rules of a guest: without a coordinator of its own."""
        identity = Identity()
        ticket = msgspec.structs.replace(
            ticket, folder=str(self.place.folder), agent=identity.member, capacity=capacity.declared, guest=True
        )
        depot = Depot(way_to_custody(ticket, Credentials(identity, ticket.secret, "agent")))
        name = shipping.folder_of(identity.member)
        with contextlib.closing(shipping.LogShipper(self.place.folder, self.place.logs, name, depot)):
            return self._run(rules, ticket, identity, make_engine)

    def _run(self, rules: AgentRules, ticket: Ticket, identity: Identity, make_engine: MakeEngine) -> RunOutcome:
        self._agent = Agent(
            Supervisor(rules),
            make_engine(ticket, self._output, self._reaper),
            ticket,
            Credentials(identity, ticket.secret, "agent"),
            coordinator=self._coordinator,
            say=self._output.say,
            on_start=self._note_start,
            on_session=self._display.show if self._display is not None else _nothing,
        )
        return self._agent.run()

    def _note_start(self, process: Process) -> None:
        self._labels.attempt(lambda: self.place.note_start(process.label, process.pid))

    def last_processes(self) -> dict[int, Process]:
        return dict(self._agent.ended) if self._agent is not None else {}

    def shortfall(self) -> Shortfall:
        return find_shortfall(self.place, had_record=self._coordinator is not None and self._coordinator.has_listened)

    def explanation(self, outcome: RunOutcome) -> list[str]:
        """Why it failed, for the person at the terminal."""
        lines = self._coordinator.last_lines() if self._coordinator is not None else []
        return causes.explain(outcome, self.place.folder, self.last_processes(), lines)


def local_engine(job: Job, logs: Path, attach: Attach | None = None) -> MakeEngine:
    def make(ticket: Ticket, output: Output, reaper: ReaperHandle) -> Engine:
        return LocalEngine(job, ticket, logs, output, reaper, attach)

    return make


def find_shortfall(place: ClaimedFolder, *, had_record: bool) -> Shortfall:
    """`had_record`: whether a coordinator has worked, and so had its database."""
    path = place.folder / DATABASE
    if not path.exists():
        was_deleted = f"{path} was deleted while the run went on; whether anything was lost cannot be said"
        return Shortfall(unrecorded=was_deleted if had_record else "")
    try:
        with RunReader(place.folder) as reader:
            return shortfalls.find_shortfall(reader)
    except JournalError as error:
        return Shortfall(unrecorded=f"whether anything was lost cannot be said: {error}")


def why_stopped(outcome: RunOutcome, place: ClaimedFolder) -> str:
    """Why the run ended before its end, though nothing failed: somebody asked for it; else empty."""
    if outcome.result not in (RunResult.ENDED, RunResult.FAILED_LATER) or outcome.reason in ("", FINISHED):
        return ""
    with contextlib.suppress(JournalError), RunReader(place.folder) as reader:
        return outcome.reason if reader.status().status == "interrupted" else ""
    return ""


def code_of(outcome: RunOutcome, shortfall: Shortfall) -> int:
    """The exit code of the command; one that has another reason to be no 0 keeps it."""
    return outcome.code or (LOST if shortfall.lost else UNSAVED if shortfall.unsaved else 0)


def report(
    outcome: RunOutcome,
    explanation: list[str],
    place: ClaimedFolder,
    resume: Sequence[str] | None = (),
    shortfall: Shortfall = Shortfall(),
    stopped: str = "",
) -> None:
    """The last lines on the terminal; nothing where all went well. `resume` is the command that goes on here, None if
    no worker was here that could have left anything; `stopped` why the run ended before its end."""
    if outcome.result is RunResult.ENDED and not any(shortfall) and not outcome.missing and not stopped:
        return
    if outcome.result is RunResult.ENDED and stopped:
        lines = [f"paceline: the run {place.name} was stopped: {stopped}", *_how_to_resume(place, resume)]
    elif outcome.result is RunResult.ENDED:
        how = without(outcome.missing) if outcome.missing else "has ended"
        lines = [f"paceline: the run {place.name} {how}"]
    elif outcome.result is RunResult.HALTED:
        lines = [f"paceline: the run {place.name} has halted: {outcome.reason}", *_how_to_go_on(place, resume)]
    elif outcome.result is RunResult.FAILED_LATER:
        further = _how_to_resume(place, resume) if stopped else []
        lines = [f"paceline: {later(place.name, stopped)}", *explanation, *further]
    elif outcome.result is RunResult.FAILED:
        lines = [f"paceline: the run {place.name} failed", *explanation]
    else:
        lines = [f"paceline: the run {place.name} was interrupted", *_how_to_resume(place, resume)]
    lines += shortfall.lines
    with contextlib.suppress(OSError):
        print("\n".join([*lines, f"logs: {place.logs}"]), file=sys.stderr, flush=True)


def without(missing: Sequence[str]) -> str:
    workers = "a worker" if len(missing) == 1 else f"{len(missing)} workers"
    return f"ended without {workers} that it was asked to have: {'; '.join(missing)}"


def later(name: str, stopped: str = "") -> str:
    """The run has a good end, which what came after it does not change."""
    ended = f"was stopped: {stopped}" if stopped else "has ended, and its training is complete"
    return f"the run {name} {ended}; after that the script failed:"


def _how_to_resume(place: ClaimedFolder, resume: Sequence[str] | None) -> list[str]:
    """After what was a person's wish: how to go on, or why that cannot be."""
    if resume and (found := names.find(place.folder / names.FOLDER)):
        return [f"go on after step {found[0].step} with:", f"  {shlex.join(resume)}"]
    with contextlib.suppress(JournalError), RunReader(place.folder) as reader:
        if not reader.members():
            return ["nothing was saved: no worker had joined the run yet"]
        if not reader.status().num_steps:
            return ["nothing was saved: no step was done yet"]
        return ["there is no checkpoint in the run's folder"]
    return []  # a guest, whose run goes on elsewhere; or there is no record


def _how_to_go_on(place: ClaimedFolder, resume: Sequence[str] | None) -> list[str]:
    if resume is None:
        return ["there were servers only on this machine: go on where workers saved what they held, and join again"]
    found = names.find(place.folder / names.FOLDER)
    if not found:
        return ["nothing could be saved on this machine; the lines above say why"]
    return [
        f"the training state after step {found[0].step} is in {found[0].path}",
        "if the run goes on elsewhere, join it again; if not, go on from this state, here, with:",
        f"  {shlex.join(resume)}",
    ]


def _nothing() -> None:
    pass


class _AgentLog(logging.FileHandler):
    """Lines that a full disk does not take are kept and written with the next ones, in silence: they are few."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, delay=True)

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def _logged_to(path: Path) -> Iterator[None]:
    """What the control plane has to say goes to a file: on the terminal it would stand between workers' lines."""
    logger = logging.getLogger("paceline")
    handler = _AgentLog(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    before = logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.propagate = before[0]
        logger.setLevel(before[1])
        logger.removeHandler(handler)
        handler.close()
