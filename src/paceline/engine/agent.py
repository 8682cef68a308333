"""The agent: the loop between the `Supervisor` machine and the processes of this host.

It waits for whatever comes first: a process ended (its descriptor), a signal, a word of the coordinator, a moment that
the machine waits for. An end is reported to the coordinator before anything else is done about it.

All of it happens on the thread that calls `run`; processes die with that thread. Only the courier and the one that
asks the coordinator for something are elsewhere, and leave their news in a box.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

from paceline.control.exit_codes import exit_words
from paceline.control.messages.agents import AgentDirective, ProcessVitals
from paceline.control.shell.client import AgentClient, command
from paceline.control.shell.line import Bell
from paceline.control.shell.ticket import Ticket
from paceline.engine.base import Engine, EngineError, Process
from paceline.engine.child import CoordinatorChild
from paceline.engine.events import (
    Action,
    AgentTick,
    AskHalt,
    CoordinatorLost,
    Event,
    Exited,
    NotStarted,
    Opened,
    PrintLine,
    ProcessStarted,
    Resumed,
    RunOutcome,
    Signal,
    SignalCoordinator,
    StartCoordinator,
    StartProcess,
    StopAsked,
    StopSelf,
    Suspended,
)
from paceline.engine.signals import ENDING, Signals
from paceline.engine.supervisor import Supervisor
from paceline.errors import PacelineError
from paceline.wire.deadline import Deadline
from paceline.wire.handshake import Credentials

logger = logging.getLogger("paceline.engine")

CONNECT_S = 0.05  # between two looks for a coordinator that is being started
LOOK_S = 0.5  # between two looks at how the processes are
HALT_S = 60.0  # for a coordinator that is being started again to hear of it
HALT_PAUSE_S = 0.2


class Box:
    """Events from other threads, and a descriptor that says that there are some."""

    def __init__(self) -> None:
        self._bell = Bell()
        self._events: deque[Event] = deque()

    def put(self, event: Event) -> None:
        self._events.append(event)
        self._bell.ring()

    def take(self) -> list[Event]:
        self._bell.silence()
        taken = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    def fileno(self) -> int:
        return self._bell.fileno()

    def close(self) -> None:
        self._bell.close()


class Agent:
    """`say` gets lines for the person at the terminal; `on_start` is called with every process that was started,
    `on_session` when the first worker among them has turned out to have a session."""

    def __init__(
        self,
        supervisor: Supervisor,
        engine: Engine,
        ticket: Ticket,
        credentials: Credentials,
        *,
        coordinator: CoordinatorChild | None,
        say: Callable[[str], None],
        on_start: Callable[[Process], None],
        on_session: Callable[[], None],
    ) -> None:
        self._machine = supervisor
        self._engine = engine
        self._ticket = ticket
        self._coordinator = coordinator
        self._say = say
        self._on_start = on_start
        self._on_session = on_session
        self._has_session = False
        self._credentials = credentials
        self._box = Box()
        self._client: AgentClient | None = None
        self._running: dict[int, Process] = {}
        self._opened: set[int] = set()
        self._vitals: dict[int, ProcessVitals] = {}
        self._stopping = threading.Event()
        self._asking: threading.Thread | None = None
        self.ended: dict[int, Process] = {}  # the last process of each slot that has ended

    def run(self) -> RunOutcome:
        with Signals() as signals:
            try:
                if self._coordinator is None:
                    self._connect(self._ticket)
                self._act(self._machine.begin(time.monotonic()))
                look_at = 0.0
                while self._machine.outcome is None:
                    self._wait(signals, look_at)
                    if time.monotonic() >= look_at:
                        look_at = time.monotonic() + LOOK_S
                        self._look()
                    self._collect(signals)
                    if self._client is None and self._coordinator is not None:
                        self._connect(self._coordinator.find_ticket())
                return self._machine.outcome
            finally:
                self._leave()

    def _connect(self, ticket: Ticket | None) -> None:
        """To this agent's own coordinator as soon as it listens."""
        if ticket is not None:
            self._ticket = ticket
            self._client = AgentClient(
                ticket, self._credentials, self._box.put, on_orphaned=lambda: self._box.put(CoordinatorLost())
            )
            self._report()

    def _leave(self) -> None:
        """Whatever happened: nothing stays."""
        self._stopping.set()
        for process in self._running.values():
            process.close()
        if self._coordinator is not None:
            self._coordinator.close()
        if self._asking is not None:
            self._asking.join()
        if self._client is not None:
            # A coordinator that is gone hears no last word.
            self._client.close(flush_s=1.0 if self._coordinator is None else 0.0)
        self._box.close()
        self._engine.close()

    # -- what happens ------------------------------------------------------------------------------------------------

    def _wait(self, signals: Signals, look_at: float) -> None:
        poll = select.poll()
        poll.register(signals.fileno(), select.POLLIN)
        poll.register(self._box.fileno(), select.POLLIN)
        for process in self._running.values():
            poll.register(process.fileno(), select.POLLIN)
        if self._coordinator is not None and self._coordinator.is_running:
            poll.register(self._coordinator.fileno(), select.POLLIN)
        until = min(look_at, self._machine.wakes_at() or look_at)
        if self._client is None:
            until = min(until, time.monotonic() + CONNECT_S)
        poll.poll(max(0.0, until - time.monotonic()) * 1000)

    def _collect(self, signals: Signals) -> None:
        ended = []
        for slot, process in list(self._running.items()):
            self._look_for_session(slot, process)  # a signal means another thing to one that has none
            if (code := process.exit_code()) is not None:
                ended.append((slot, process, code))
        # Where one signal went to all processes, whoever ended by it did not fail: what this one was sent comes first.
        for number in signals.take():
            if number in ENDING:
                self._handle(StopAsked(number))
            else:
                self._handle(Suspended() if number == signal.SIGTSTP else Resumed())
        for slot, process, code in ended:
            self._bury(slot, process, code)
        if self._coordinator is not None and (last := self._coordinator.take_exit()) is not None:
            self._handle(last)
        for event in self._box.take():
            self._handle(event)
        self._handle(AgentTick())

    def _bury(self, slot: int, process: Process, code: int) -> None:
        del self._running[slot]
        self._opened.discard(slot)
        self._vitals.pop(process.pid, None)
        self._handle(Exited(slot, code))
        self._report()
        logger.info("%s: process %d %s", process.label, process.pid, exit_words(code))
        process.close()
        self.ended[slot] = process

    def _look(self) -> None:
        for process in self._running.values():
            self._vitals[process.pid] = process.vitals()
        self._report()

    def _look_for_session(self, slot: int, process: Process) -> None:
        if slot not in self._opened and process.has_session():
            self._opened.add(slot)
            self._handle(Opened(slot))
            logger.info("%s has a session", process.label)
            if not self._has_session and not self._is_server(slot):
                self._has_session = True
                self._on_session()

    def _report(self) -> None:
        if self._client is not None:
            servers = tuple(process.pid for slot, process in self._running.items() if self._is_server(slot))
            machine = self._machine
            self._client.update(
                self._vitals,
                machine.exits,
                machine.exhausted,
                servers,
                machine.servers_exhausted,
                machine.num_expected,
            )

    def _is_server(self, slot: int) -> bool:
        return self._machine.slots[slot].is_server

    # -- what is done ------------------------------------------------------------------------------------------------

    def _handle(self, event: Event) -> None:
        if isinstance(event, AgentDirective) and (event.kill or event.over):
            logger.info("the coordinator says: %s", event)
        self._act(self._machine.handle(event, time.monotonic()))

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                self._start(action.slot)
            elif isinstance(action, Signal) and action.slot in self._running:
                self._running[action.slot].signal(action.number)
            elif isinstance(action, StartCoordinator):
                assert self._coordinator is not None
                self._coordinator.start()
            elif isinstance(action, SignalCoordinator):
                assert self._coordinator is not None
                self._coordinator.signal(action.number)
            elif isinstance(action, AskHalt):
                self._asking = threading.Thread(
                    target=self._ask_halt, args=(action.reason,), name="paceline-halt", daemon=True
                )
                self._asking.start()
            elif isinstance(action, StopSelf):
                os.kill(os.getpid(), signal.SIGSTOP)
            elif isinstance(action, PrintLine):
                self._say(action.text)

    def _start(self, slot: int) -> None:
        try:
            process = self._engine.start(slot)
        except EngineError as error:
            self._handle(NotStarted(slot, str(error)))
            return
        self._running[slot] = process
        self._vitals[process.pid] = ProcessVitals("R", True)
        logger.info("%s: process %d started", process.label, process.pid)
        self._handle(ProcessStarted(slot, process.pid))
        self._on_start(process)

    def _ask_halt(self, reason: str) -> None:
        """Until it is heard: the coordinator may be on its way back."""
        ends_at = time.monotonic() + HALT_S
        while not self._stopping.is_set():
            try:
                deadline = Deadline(2.0, "asking the coordinator to end the run")
                command(self._ticket, "halt", reason, answer_type=bool, deadline=deadline)
                return
            except PacelineError as error:
                if time.monotonic() > ends_at:
                    self._say(f"the coordinator does not answer ({error}); Ctrl-C again to kill")
                    return
            self._stopping.wait(HALT_PAUSE_S)
