"""The member's and the agent's side of the control plane: the shell around a member's machine, and commands.

Threads: `post` and `update` are called from any; the courier's thread brings directives. One lock guards the machine;
what it wants done is handed out in its order, outside of the lock, by whichever thread is there: `act` must not wait.
A `SendReport` is not handed out: reports are built anew from the machine when they are sent, so the newest one counts.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from paceline.control.leases.messages import LeaseGrant, LeaseReport
from paceline.control.machines.member_events import Exit, SendReport
from paceline.control.messages.agents import AgentDirective, AgentReport, ProcessVitals
from paceline.control.messages.members import Directive, Report
from paceline.control.messages.plan import Phase, Plan
from paceline.control.messages.progress import MAX_SENT, ProgressKeeper, Recorded
from paceline.control.ordering import Newest
from paceline.control.shell.courier import Courier, CourierCallbacks, reach
from paceline.control.shell.ticket import Ticket
from paceline.errors import ProtocolError
from paceline.fault_points import FaultPoint
from paceline.wire import calls
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.frame import Header
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

logger = logging.getLogger("paceline.control")

HEARTBEAT_S = 0.5
ORPHAN_S = 600.0
SAYING: FaultPoint[[str, str], bool] = FaultPoint("a member says something of this kind, unless it is to be lost")
MEMBERS_ROOM, AGENTS_ROOM, COMMANDS_ROOM, CUSTODY_ROOM = "control", "agent", "command", "custody"

Answer = TypeVar("Answer")


def _nothing() -> None:
    pass


class Machine(Protocol):
    """What a client can run: `Member`, or `ServerMember`."""

    name: str

    @property
    def plan(self) -> Plan | None: ...

    def handle(self, event: Any) -> Iterable[Any]: ...

    def report(self) -> Report: ...


class LeaseListener(Protocol):
    """A worker's leases, where it does leases; called on the courier's thread."""

    def report(self) -> LeaseReport | None:
        """What to say of them; None while there is nothing to say."""

    def hear(self, grant: LeaseGrant) -> None: ...


AMachine = TypeVar("AMachine", bound=Machine)


class MemberClient(Generic[AMachine]):
    """Runs a member's machine. `act` gets every action but `SendReport`; `on_orphaned` is called, on the courier's
    thread, when the coordinator was not heard of for `orphan_s`. The client owns nothing of what it is given."""

    def __init__(
        self,
        ticket: Ticket,
        machine: AMachine,
        credentials: Credentials,
        act: Callable[[Any], None],
        *,
        on_orphaned: Callable[[], None] = _nothing,
        heartbeat_s: float = HEARTBEAT_S,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        if credentials.identity.member != machine.name:
            raise ValueError(
                f"the machine is member {machine.name}, the credentials are of {credentials.identity.member}; "
                "a member can speak only for itself"
            )
        self.progress = ProgressKeeper(machine.name)
        self._machine = machine
        self._act = act
        self._lock = threading.Lock()
        self._queue: deque[Any] = deque()
        self._is_handing_out = False
        self._has_verdict = False
        self._is_main = False  # as of the last report: whether it sends its rows
        self.leases: LeaseListener | None = None
        owner = CourierCallbacks(self._compose, self._hear, self.progress.reconnected, on_orphaned, self._is_spent)
        self._courier = Courier(
            ticket,
            credentials,
            MEMBERS_ROOM,
            owner,
            heartbeat_s=heartbeat_s,
            orphan_s=orphan_s,
            lights_beacon=True,
        )
        self._courier.start()

    # -- the machine -------------------------------------------------------------------------------------------------

    def post(self, event: Any) -> None:
        """Let the machine handle an event. If another thread is handing out actions just now, those of this event
        follow there, and this call returns at once. Not for signal handlers, which may interrupt a holder of the
        lock: those leave it to a thread."""
        with self._lock:
            says = False
            for action in self._machine.handle(event):
                if isinstance(action, SendReport):
                    says = True
                else:
                    self._queue.append(action)
                    self._has_verdict = self._has_verdict or isinstance(action, Exit)
            hands_out = not self._is_handing_out
            self._is_handing_out = True
        if says:
            self._courier.speak()
        if hands_out:
            self._hand_out()

    def _hand_out(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_handing_out = False
                    return
                action = self._queue.popleft()
            try:
                self._act(action)
            except BaseException:
                with self._lock:
                    self._is_handing_out = False
                raise

    def look(self, question: Callable[[AMachine], Answer]) -> Answer:
        """Ask the machine something, such as its offer; the question must not keep it, and must not wait."""
        with self._lock:
            return question(self._machine)

    # -- the courier's side ------------------------------------------------------------------------------------------

    def _compose(self) -> Iterable[tuple[str, Any]]:
        with self._lock:
            report = self._machine.report()
            plan = self._machine.plan
            # After the end no plan makes another one main if the main one dies: everybody makes sure of its rows.
            is_last_word = report.phase is Phase.ENDED and self._courier.is_closing
            self._is_main = is_last_word or (plan is not None and plan.rank_of(self._machine.name) == 0)
        frames: list[tuple[str, Any]] = [("report", report)]
        if (progress := self.progress.take(self._is_main)) is not None:
            frames.append(("progress", progress))
        if self.leases is not None and (leases := self.leases.report()) is not None:
            frames.append(("leases", leases))
        return [frame for frame in frames if not SAYING.reach(report.member, frame[0])]

    def speak(self) -> None:
        """Say what is new at once."""
        self._courier.speak()

    def _hear(self, header: Header) -> None:
        if header.kind in ("directive", "plan"):
            directive = header.read_body(Directive)
            try:
                self.post(directive)
            except Exception:  # an error of `act` must not end the connection, without which nobody hears of it
                logger.exception("acting on the coordinator's word failed")
        elif header.kind == "leases":
            if self.leases is not None:
                self.leases.hear(header.read_body(LeaseGrant))
        elif header.kind == "recorded":
            self.progress.recorded(header.read_body(Recorded))
            if self._courier.is_closing or (self._is_main and self.progress.num_unrecorded() >= MAX_SENT):
                self._courier.speak()
        else:
            raise ProtocolError(f"the coordinator sent {header.kind!r}, which no member understands")

    def _is_spent(self) -> bool:
        return not (self._is_main and (self.progress.num_unrecorded() or self.progress.has_lines()))

    # -- the end -----------------------------------------------------------------------------------------------------

    def unheard_s(self) -> float:
        """How long the coordinator has not been heard of."""
        return self._courier.unheard_s()

    def close(self, flush_s: float = 5.0) -> None:
        """Send the last report, wait for it to be heard, and end. Who has its verdict does not look for a coordinator
        that is gone."""
        with self._lock:
            persist = not self._has_verdict
        self._courier.close(flush_s, persist=persist)


class AgentClient:
    """Says what an agent sees of its children; `on_directive` is called on the courier's thread for every directive
    that is newer than the last."""

    def __init__(
        self,
        ticket: Ticket,
        credentials: Credentials,
        on_directive: Callable[[AgentDirective], None],
        *,
        on_orphaned: Callable[[], None] = _nothing,
        heartbeat_s: float = HEARTBEAT_S,
        orphan_s: float = ORPHAN_S,
    ) -> None:
        self._lock = threading.Lock()
        self._report = AgentReport(credentials.identity.member, 0)
        self._on_directive = on_directive
        self._newest = Newest()
        owner = CourierCallbacks(self._compose, self._hear, _nothing, on_orphaned, lambda: True)
        self._courier = Courier(ticket, credentials, AGENTS_ROOM, owner, heartbeat_s=heartbeat_s, orphan_s=orphan_s)
        self._courier.start()

    def update(
        self,
        living: Mapping[int, ProcessVitals],
        exits: Mapping[int, str],
        exhausted: bool,
        servers: tuple[int, ...] = (),
        servers_exhausted: bool = False,
        num_expected: int = -1,
    ) -> None:
        """All that is known, by process id; said at once and with every heartbeat."""
        with self._lock:
            agent, number = self._report.agent, self._report.number
            self._report = AgentReport(
                agent, number, dict(living), dict(exits), exhausted, servers, servers_exhausted, num_expected
            )
        self._courier.speak()

    def _compose(self) -> Iterable[tuple[str, Any]]:
        with self._lock:
            self._report = msgspec.structs.replace(self._report, number=self._report.number + 1)
            return [("report", self._report)]

    def _hear(self, header: Header) -> None:
        if header.kind != "directive":
            raise ProtocolError(f"the coordinator sent {header.kind!r}, which no agent understands")
        directive = header.read_body(AgentDirective)
        if self._newest.passes(directive):
            try:
                self._on_directive(directive)
            except Exception:
                logger.exception("acting on the coordinator's word failed")

    def unheard_s(self) -> float:
        return self._courier.unheard_s()

    def close(self, flush_s: float = 5.0) -> None:
        self._courier.close(flush_s, persist=True)


def command(
    ticket: Ticket, operation: str, arguments: Any = None, *, answer_type: type[Answer], deadline: Deadline
) -> Answer:
    """Ask the coordinator as a person: "status", "drain", "halt", "invite". Raises `CallFailed` with its objection."""
    mine = Credentials(Identity(), ticket.secret, "person")
    connection = reach(ticket, mine, COMMANDS_ROOM, deadline=deadline)
    try:
        return calls.call(connection, operation, arguments, answer_type=answer_type, deadline=deadline)
    finally:
        connection.close()


def way_to_custody(ticket: Ticket, mine: Credentials) -> Callable[[Deadline], Connection]:
    """How a worker or an agent of another host reaches who keeps the run's checkpoints and logs: the coordinator."""
    return lambda deadline: reach(ticket, mine, CUSTODY_ROOM, deadline=deadline)
