"""The coordinator's shell: turns bytes into events of the machine and its actions into bytes; one a run.

    python -m paceline.control.shell.service        with its `Config` on the descriptor that PACELINE_COORDINATOR_FD
    names

Promises
- What the machine wants remembered is on disk, in one transaction, before anything of the same batch is sent. If that
  fails, nothing of the batch is sent, and the coordinator ends with exit code `BROKEN`, or `FULL` for want of room.
- Started again with the same config and folder, it is found at the same address, under the same certificate and
  secret, with a higher term.
- It does not outlive the process that started it by more than `ORPHANED_S`.

Threads: one a connection (`Switchboard`), the recorder's, and the one in `run`, which ticks; whichever has an event
runs the machine (`Driver`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.exit_codes import BROKEN, ENDED, FAILED, FULL, INTERRUPTED
from paceline.control.journal.disk import Cosmetic, is_want_of_room
from paceline.control.journal.folder import FolderLock, FolderRefused, prepare
from paceline.control.journal.journal import Journal, MemberRow
from paceline.control.journal.reader import STARTING
from paceline.control.journal.recorder import Recorder, described, states_of
from paceline.control.leases.messages import LeaseReport
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Connected, Disconnected, Drain, Halt, Tick
from paceline.control.machines.coordinator_events import CoordinatorState as MachineStanding
from paceline.control.machines.roster import Fate
from paceline.control.messages.agents import AgentReport
from paceline.control.messages.members import Report
from paceline.control.messages.plan import Plan
from paceline.control.messages.progress import Progress, Recorded
from paceline.control.shell import ticket as tickets
from paceline.control.shell.client import AGENTS_ROOM, COMMANDS_ROOM, CUSTODY_ROOM, MEMBERS_ROOM
from paceline.control.shell.config import VARIABLE, Config
from paceline.control.shell.driver import Driver
from paceline.control.shell.invitation import Door
from paceline.control.shell.switchboard import Switchboard
from paceline.control.shell.ticket import Access, Ticket
from paceline.custody.custodian import Custodian
from paceline.errors import AddressError, ConnectionLost, PacelineError, ProtocolError
from paceline.wire import calls
from paceline.wire.beacon import beacons_of
from paceline.wire.card import this_host
from paceline.wire.connection import Connection
from paceline.wire.endpoint import Endpoint
from paceline.wire.frame import Header
from paceline.wire.handshake import Credentials, Visitor
from paceline.wire.identity import Identity
from paceline.wire.waiting import READ, is_ready

logger = logging.getLogger("paceline.control")

PORT_KEY = "coordinator port"
STARTED_KEY = "started"
TICK_S = 0.1
FAREWELL_S = 5.0  # for the members to get their verdict
ORPHANED_S = 10.0
COMMAND_S = 30.0


class StatusAnswer(msgspec.Struct, frozen=True):
    """What the command "status" answers."""

    run: str
    term: int
    fence: int
    generation: int
    pending: int
    over: str
    reason: str
    halting: str
    members: list[dict[str, Any]]


class CoordinatorService:
    """Listens from when it is made until the end of `run`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._folder = prepare(Path(config.folder))
        self._alarm = threading.Event()
        self._stopped = False
        self._members = Switchboard(
            ("worker", "server"),
            admit=self._admit_member,
            arrived=self._member_arrived,
            left=self._member_left,
            hear=self._hear_member,
        )
        self._agents = Switchboard(("agent",), admit=_ignore, arrived=_ignore, left=_ignore, hear=self._hear_agent)
        self._people = calls.Callers(self._serve_person)
        self._keeping = calls.Callers(Custodian(self._folder, self._why_not_store).serve)
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(FolderLock(self._folder)))
            self._journal = stack.enter_context(contextlib.closing(Journal(self._folder)))
            remembered = self._journal.remembered()
            self._started = remembered.get(STARTED_KEY, str(time.time()).encode())
            machine = Coordinator(
                config.settings,
                time.monotonic(),
                remembered,
                this_host(),
                is_again=config.is_again,
                born=int(time.time()),
            )
            self._driver = Driver(machine, self._journal, self._members, self._agents, self._alarm)
            identity = Identity(config.member, pem=config.pem)
            self._endpoint = stack.enter_context(self._listen(identity, remembered))
            self.ticket = self._make_ticket(identity)
            self._journal.commit(
                {PORT_KEY: str(self._endpoint.address[1]).encode(), STARTED_KEY: self._started},
            )
            self._door = stack.enter_context(contextlib.closing(self._make_door(identity, remembered)))
            self._begin()
            self._recorder = Recorder(self._journal, self._look, self._answer)
            stack.callback(self._recorder.halt)
            self._access = Cosmetic(self._folder / tickets.ACCESS_FILE, "this file, for commands", logger.warning)
            self._write_access()
            self._cleanup = stack.pop_all()
        # A member whose beacon went out is not connected any more: the connection itself ends later, with its memory.
        beacons_of(self._endpoint).watch(None, self._lose)
        self._endpoint.open_room(MEMBERS_ROOM, self._members.welcome)
        self._endpoint.open_room(AGENTS_ROOM, self._agents.welcome)
        self._endpoint.open_room(COMMANDS_ROOM, self._people.welcome)
        self._endpoint.open_room(CUSTODY_ROOM, self._keeping.welcome)

    def _write_access(self) -> None:
        """An earlier coordinator's leads to this one too, so one that cannot be written now is written later."""
        access = Access(os.getpid(), self.ticket)
        self._has_access = self._access.attempt(lambda: tickets.write_access(self._folder, access))

    def _begin(self) -> None:
        """The new term is on disk before anybody can hear of it."""
        self._driver.post(Tick())
        if self._driver.failure is not None:
            raise self._driver.failure

    def _make_ticket(self, identity: Identity) -> Ticket:
        config = self.config
        return Ticket(
            run=config.run,
            folder=str(self._folder),
            address=(config.advertised, self._endpoint.address[1]),
            local_name=config.local_name,
            host=this_host(),
            secret=config.secret,
            fingerprint=identity.fingerprint,
            tls=config.tls,
            replicas=config.settings.replicas,
            resumed=config.resumed,
        )

    def _listen(self, identity: Identity, remembered: Mapping[str, bytes]) -> Endpoint:
        config = self.config
        mine = Credentials(identity, config.secret, "coordinator")
        known = int(remembered.get(PORT_KEY, b"0")) or config.last_port
        try:
            return Endpoint(
                mine, host=config.host, port=config.port or known, tls=config.tls, local_name=config.local_name
            )
        except AddressError:
            if config.port or not known:
                raise
            logger.warning("port %d of the earlier coordinator is taken; its members will not find this one", known)
            return Endpoint(mine, host=config.host, tls=config.tls, local_name=config.local_name)

    def _make_door(self, identity: Identity, remembered: Mapping[str, bytes]) -> Door:
        return Door(
            self.ticket,
            identity,
            host=self.config.host,
            advertised=self.config.advertised,
            remember=self._journal.commit,
            remembered=remembered,
        )

    # -- members, agents ---------------------------------------------------------------------------------------------

    def _admit_member(self, visitor: Visitor) -> None:
        record = self._driver.machine.records.get(visitor.member)
        if record is not None and record.introduction.card.fingerprint != visitor.fingerprint:
            raise ProtocolError(f"it says that it is member {visitor.member}, but has another certificate")

    def _member_arrived(self, visitor: Visitor) -> None:
        self._driver.post(Connected(visitor.member))

    def _member_left(self, visitor: Visitor) -> None:
        self._lose(visitor.member)

    def _lose(self, member: str) -> None:
        with contextlib.suppress(ConnectionLost):
            self._driver.post(Disconnected(member))

    def _hear_member(self, visitor: Visitor, header: Header) -> None:
        if header.kind == "report":
            report = header.read_body(Report)
            _check_speaker(visitor, report.member)
            introduction = report.introduction
            if introduction is not None:
                _check_speaker(visitor, introduction.card.member)
                if introduction.card.fingerprint != visitor.fingerprint:
                    raise ProtocolError("it introduced itself with another certificate than it has")
            self._driver.post(report)
        elif header.kind == "leases":
            leases = header.read_body(LeaseReport)
            _check_speaker(visitor, leases.member)
            self._driver.post(leases)
        elif header.kind == "progress":
            progress = header.read_body(Progress)
            _check_speaker(visitor, progress.member)
            self._recorder.add(progress)
        else:
            raise ProtocolError(f"it sent {header.kind!r}, which members do not say")

    def _hear_agent(self, visitor: Visitor, header: Header) -> None:
        if header.kind != "report":
            raise ProtocolError(f"it sent {header.kind!r}, which agents do not say")
        report = header.read_body(AgentReport)
        _check_speaker(visitor, report.agent)
        self._driver.post(report)

    def _why_not_store(self, visitor: Visitor) -> str:
        """What a member that was lost writes is of a history that may go on no more."""
        record = self._driver.machine.records.get(visitor.member)
        if record is None or visitor.role != "worker" or record.introduction.card.fingerprint != visitor.fingerprint:
            return f"{visitor.role} {visitor.member} is no worker of this run; its checkpoints are not taken"
        if record.fate is not None and record.fate is not Fate.RELEASED:
            why = record.fate.value
            return f"worker {visitor.member} is not in the run any more ({why}); its checkpoints are not taken"
        return ""

    # -- the recorder's side -----------------------------------------------------------------------------------------

    def _look(self) -> tuple[list[MemberRow], dict[str, str]]:
        with self._driver.standing_still() as machine:
            states, standing, starting = states_of(machine), machine.standing, machine.starting()
        status = _ending_of(standing) or ("gathering" if standing.current is None else "running")
        if not standing.over and standing.current is not None and standing.fence > standing.newest:
            status = "fencing"
        run = {"name": self.config.run, "status": status, "reason": standing.reason or standing.halting}
        run |= {"applied": str(max((state.applied for state in states), default=-1)), "started": self._started.decode()}
        run[STARTING] = msgspec.json.encode(starting).decode()
        return states, run | {f"fact/{name}": value for name, value in (standing.facts or {}).items()}

    def _answer(self, member: str, recorded: Recorded) -> None:
        self._members.put(member, "recorded", recorded)

    # -- people ------------------------------------------------------------------------------------------------------

    def _serve_person(self, connection: Connection, _: Visitor) -> None:
        handlers = {"status": self._status, "drain": self._drain, "halt": self._halt, "invite": self._invite}
        calls.serve(connection, handlers, idle_s=COMMAND_S, answer_s=COMMAND_S)

    def _status(self, _: calls.CallBody) -> object:
        with self._driver.standing_still() as machine:
            states, standing = states_of(machine), machine.standing
        return StatusAnswer(
            run=self.config.run,
            term=standing.term,
            fence=standing.fence,
            generation=_generation(standing.current),
            pending=_generation(standing.pending),
            over=standing.over,
            reason=standing.reason,
            halting=standing.halting,
            members=[described(state) for state in states],
        )

    def _drain(self, request: calls.CallBody) -> object:
        member: str = request.read(str)
        with self._driver.standing_still() as machine:
            known = [record.member for record in [*machine.census.alive, *machine.census.servers]]
            plan = machine.standing.current
            staying = [record.member for record in machine.census.staying(plan)] if plan is not None else []
        if member not in known:
            raise ValueError(f"there is no member {member!r} in this run; those that live are {known}")
        if staying == [member]:
            raise ValueError(
                f"member {member} is the only worker that is at work, and the run would end with it: wait until "
                "another has come, or end the run with `paceline stop`"
            )
        self._driver.post(Drain(member))
        return None

    def _halt(self, request: calls.CallBody) -> object:
        """Whether the run was at work: if not, there is no step to wait for."""
        with self._driver.standing_still() as machine:
            is_at_work = machine.standing.current is not None or machine.standing.pending is not None
        self._driver.post(Halt(request.read(str)))
        return is_at_work

    def _invite(self, request: calls.CallBody) -> object:
        valid_s, uses = request.read(tuple[float, int])
        return self._door.invite(valid_s, uses)

    # -- the end -----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """End this coordinator, not the run: it can be started again. May be called by a signal handler."""
        self._stopped = True
        self._journal.stop_waiting()
        self._alarm.set()

    def run(self) -> int:
        """Tick until the run is over, or this coordinator is to end; its exit code."""
        parent = _Parent(self.config.parent)
        ends_at: float | None = None
        next_tick = time.monotonic()
        try:
            while not self._stopped and self._driver.failure is None:
                if self._alarm.wait(max(0.0, next_tick - time.monotonic())):
                    self._alarm.clear()
                    self._driver.work_off()
                now = time.monotonic()
                if now < next_tick or self._stopped:
                    continue
                next_tick = max(next_tick + TICK_S, now)
                if not self._has_access:
                    self._write_access()
                with contextlib.suppress(ConnectionLost):
                    self._driver.post(Tick())
                if ends_at is None and (self._driver.over is not None or parent.is_gone()):
                    ends_at = now + (FAREWELL_S if self._driver.over is not None else ORPHANED_S)
                if ends_at is not None and (now > ends_at or self._is_deserted()):
                    break
        finally:
            parent.close()
            code = self._end()
        return code

    def _is_deserted(self) -> bool:
        """Whether nobody is left who is to hear of the end, or who brings the last lines of its logs."""
        has_visitors = self._members.num_lines() > 0 or self._keeping.num_connections() > 0
        return not has_visitors and self._agents.is_quiet()

    def _end(self) -> int:
        over, failure = self._driver.over, self._driver.failure
        last = {"status": "interrupted", "reason": "its coordinator ended; start the run again to go on"}
        if over is not None:
            status = _ending_of(self._driver.machine.standing)
            last = {"status": status, "reason": over.reason, "ended": str(time.time())}
            tickets.remove_access(self._folder)
        elif failure is not None:
            last["reason"] = str(failure)
        self._endpoint.close()
        self._people.close()
        self._keeping.close()
        self._members.close(flush_s=1.0)
        self._agents.close(flush_s=1.0)
        self._recorder.close(last)
        self._cleanup.close()
        if failure is not None:
            logger.critical("the coordinator ends: %s", failure)
            return _code_of(failure, self._folder)
        if over is None:
            return INTERRUPTED
        return FAILED if over.failed else ENDED


class _Parent:
    """The process that started this one; 0 for none."""

    def __init__(self, pid: int) -> None:
        self._gone = bool(pid) and os.getppid() != pid
        self._process = os.pidfd_open(pid) if pid and not self._gone else -1

    def is_gone(self) -> bool:
        return self._gone or (self._process >= 0 and is_ready(self._process, READ))

    def close(self) -> None:
        if self._process >= 0:
            os.close(self._process)


def _ignore(_: Visitor) -> None:
    """Agents are known by their reports alone."""


def _check_speaker(visitor: Visitor, member: str) -> None:
    if visitor.member != member:
        raise ProtocolError(f"it is {visitor.member}, but speaks for {member}")


def _ending_of(standing: MachineStanding) -> str:
    """How the run is over, for people; empty while it is not. One that was asked to stop can go on."""
    return "interrupted" if standing.over == "ended" and standing.halting else standing.over


def _code_of(error: Exception, folder: Path) -> int:
    return FULL if is_want_of_room(error, folder) else BROKEN


def _generation(plan: Plan | None) -> int:
    return plan.generation if plan is not None else 0


# -- as a process ----------------------------------------------------------------------------------------------------


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s coordinator: %(message)s")
    # Ctrl-C reaches every process of a terminal; what it means for the run is for the agent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    config = None
    try:
        config = tickets.take_inherited(VARIABLE, Config)
        if config is None:
            raise ValueError(f"{VARIABLE} is not set; the coordinator is started by an agent, see `paceline run`")
        service = CoordinatorService(config)
    except (PacelineError, ValueError, OSError) as error:
        with contextlib.suppress(OSError):  # its log may be on the same full disk
            print(f"paceline coordinator: {error}", file=sys.stderr, flush=True)
        code = _code_of(error, Path(config.folder if config is not None else os.sep))
        return 2 if code == BROKEN and isinstance(error, FolderRefused | ValueError) else code
    signal.signal(signal.SIGTERM, lambda *_: service.stop())
    if ended.is_set():
        service.stop()
    return service.run()


if __name__ == "__main__":
    sys.exit(main())
