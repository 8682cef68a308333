"""What a coordinator costs: N members connect, are seated in one plan, and report twice a second while their operation
numbers grow, as in a training.

The service is a real one, a process of its own; the members are
real connections and real machines, many to a process. "processor" is that of the service's process alone, user and
system. The round trip is from a heartbeat's send to its answer, as a member sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import resource
import select
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.common import Benchmark, Found, Option, median
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import (
    Begin,
    Event,
    FormGroup,
    GroupFormed,
    MemberReady,
    OperationKind,
    StateStaged,
    Take,
)
from paceline.control.messages.members import Directive, Introduction
from paceline.control.messages.plan import Phase
from paceline.control.messages.progress import Recorded
from paceline.control.shell.config import Config, launch
from paceline.control.shell.courier import reach
from paceline.control.shell.line import Bell, ControlConnection
from paceline.control.shell.ticket import Ticket, read_access
from paceline.errors import WireError
from paceline.wire.card import Card, this_host
from paceline.wire.deadline import Deadline
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

HEARTBEAT_S = 0.5
DIALERS = 8
SEATING_S = 300.0


class Extra:
    """One member of the crowd: a machine and a line, driven by its process's loop."""

    def __init__(self, ticket: Ticket) -> None:
        identity = Identity()
        self.machine = Member(identity.member)
        self.bell = Bell()
        self.line = ControlConnection(_dial(ticket, identity), self.bell)
        self.sent_at = 0.0
        self.beats_at = 0.0
        host = this_host()
        card = Card(identity.member, "worker", host, ("127.0.0.1", 1), "", identity.fingerprint, False, (0, 1))
        self.post(MemberReady(Introduction(card, os.getpid(), "here", "agent", {"model": "m"})))
        self.post(Begin(OperationKind.STEP))

    def post(self, event: Event) -> None:
        """Groups are formed, and state is there, as soon as it is asked for."""
        for action in self.machine.handle(event):
            if isinstance(action, FormGroup):
                self.post(GroupFormed(action.plan.generation))
            elif isinstance(action, Take):
                self.post(StateStaged(action.plan.generation, max(action.plan.base, 0)))
        self.beats_at = min(self.beats_at, time.monotonic())

    def beat(self, now: float) -> None:
        if self.machine.phase is Phase.ACTIVE:
            self.machine.applied += 1
        self.line.put("report", self.machine.report())
        self.sent_at, self.beats_at = now, now + HEARTBEAT_S
        self.line.send()

    def hear(self) -> list[float]:
        """The round trips that end here."""
        trips = []
        for header in self.line.frames():
            if header.kind in ("directive", "plan"):
                if self.sent_at:
                    trips.append(time.monotonic() - self.sent_at)
                    self.sent_at = 0.0
                before = self.machine.generation, self.machine.phase, self.machine._introduced
                beats_at = self.beats_at
                self.post(header.read_body(Directive))
                if before == (self.machine.generation, self.machine.phase, self.machine._introduced):
                    self.beats_at = beats_at  # nothing new to say
            else:
                header.read_body(Recorded)
        return trips


def _dial(ticket: Ticket, identity: Identity) -> Any:
    """The endpoint takes a bounded number of handshakes at a time; who is turned away comes again."""
    mine = Credentials(identity, ticket.secret, "worker")
    give_up_at = time.monotonic() + SEATING_S
    while True:
        try:
            return reach(ticket, mine, "control", deadline=Deadline(20.0, "joining"))
        except WireError:
            if time.monotonic() > give_up_at:
                raise
            time.sleep(0.05)


def crowd(pipe: Pipe, ticket: Ticket, size: int, seconds: float) -> None:
    """A process of the crowd: joins, says when all are seated, then measures round trips for `seconds`."""
    _raise_limit()
    with ThreadPoolExecutor(DIALERS) as dialers:
        extras = list(dialers.map(lambda _: Extra(ticket), range(size)))
    poll = select.epoll()
    by_descriptor = {extra.line.connection.fileno(): extra for extra in extras}
    for descriptor in by_descriptor:
        poll.register(descriptor, select.EPOLLIN)
    trips: list[float] = []
    ends_at, seated_at = time.monotonic() + SEATING_S, 0.0
    while (now := time.monotonic()) < ends_at:
        for extra in extras:
            if now >= extra.beats_at:
                extra.beat(now)
        for descriptor, _ in poll.poll(0.005):
            trips += by_descriptor[descriptor].hear()
        if not seated_at and all(extra.machine.phase is Phase.ACTIVE for extra in extras):
            seated_at = time.monotonic()
            pipe.send(seated_at)
            pipe.recv()  # everybody is seated
            for extra in extras:
                extra.beats_at = time.monotonic() + random.uniform(0.0, HEARTBEAT_S)
            trips = []
            ends_at = time.monotonic() + seconds
    pipe.send(trips if seated_at else None)
    pipe.recv()
    for extra in extras:
        extra.line.close()


def _raise_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure_crowd(size: int, seconds: float, num_processes: int) -> dict[str, float]:
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        settings = RunSettings(wanted=size, fewest=size, most=size, silence_s=60.0, grace_s=SEATING_S)
        service = launch(
            Config.new(run="crowd", folder=Path(folder), settings=settings),
            stderr=subprocess.DEVNULL,
        )
        processes = []
        try:
            ticket = _ticket(Path(folder), service.pid)
            began, used_at_first = time.monotonic(), _processor_s(service.pid)
            pipes = []
            for number in range(num_processes):
                share = size // num_processes + (number < size % num_processes)
                ours, theirs = context.Pipe()
                process = context.Process(target=crowd, args=(theirs, ticket, share, seconds))
                process.start()
                processes.append(process)
                pipes.append(ours)
            seated_s = max(_receive(pipe) for pipe in pipes) - began
            seating_used = _processor_s(service.pid) - used_at_first
            used, since = _processor_s(service.pid), time.monotonic()
            for pipe in pipes:
                pipe.send("go")
            trips = [trip for pipe in pipes for trip in _receive(pipe)]
            used, elapsed = _processor_s(service.pid) - used, time.monotonic() - since
            memory_mib = _memory_mib(service.pid)
            for pipe in pipes:
                pipe.send("enough")
        finally:
            for process in processes:
                process.join(10.0)
                process.kill()
            service.kill()
            service.wait()
    trips.sort()
    return {
        "members": size,
        "seated_s": seated_s,
        "seating_processor_ms_a_member": seating_used / size * 1e3,
        "processor_ms_a_member_and_second": used / elapsed / size * 1e3,
        "processor_share": used / elapsed,
        "beats_a_second": len(trips) / elapsed,
        "round_trip_p50_ms": median(trips) * 1e3,
        "round_trip_p99_ms": trips[int(len(trips) * 0.99)] * 1e3,
        "memory_mib": memory_mib,
    }


def _receive(pipe: Pipe) -> Any:
    if not pipe.poll(2 * SEATING_S):
        raise TimeoutError("the crowd does not answer")
    return pipe.recv()


def _ticket(folder: Path, pid: int) -> Ticket:
    gives_up_at = time.monotonic() + 60.0
    while time.monotonic() < gives_up_at:
        with contextlib.suppress(ValueError):
            access = read_access(folder)
            if access.pid == pid:
                return access.ticket
        time.sleep(0.02)
    raise TimeoutError("the service does not start")


COLUMNS = {
    "members": ("members", "d"),
    "seated_s": ("all seated, s", ".1f"),
    "seating_processor_ms_a_member": ("processor a seat, ms", ".1f"),
    "processor_ms_a_member_and_second": ("processor a member and second, ms", ".2f"),
    "beats_a_second": ("beats a second", ".0f"),
    "round_trip_p50_ms": ("round trip p50, ms", ".1f"),
    "round_trip_p99_ms": ("p99, ms", ".1f"),
    "memory_mib": ("memory, MiB", ".0f"),
}


def measure(options: argparse.Namespace) -> Found:
    _raise_limit()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["torch", "benchmarks.control"])
    table = Table(*(title for title, _ in COLUMNS.values()), title="a coordinator")
    rows = []
    for size in options.members:
        row = measure_crowd(size, options.seconds, options.processes)
        rows.append(row)
        table.add_row(*(f"{row[name]:{form}}" for name, (_, form) in COLUMNS.items()))
    return Found({"rows": rows}, [table])


BENCHMARK = Benchmark(
    __doc__,
    "control",
    measure,
    options=[
        Option("--members", [50, 200, 1000], quick=[10]),
        Option("--seconds", 10.0, quick=1.0, help="of heartbeats, for each row"),
        Option("--processes", 2, quick=2, help="that the crowd is spread over"),
    ],
)


if __name__ == "__main__":
    BENCHMARK.main()
