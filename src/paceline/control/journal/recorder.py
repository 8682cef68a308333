"""Brings what people want to see into the run's database, a few transactions a second, on a thread of its own, so that
a slow disk holds up nobody.

Failure: rows that cannot be written are kept and tried again; it is logged once, until it works again. A worker is
told that its rows are recorded only when they are, and keeps them until then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from paceline.control.journal.journal import Happening, Journal, JournalError, MemberRow
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.placement_news import num_arriving
from paceline.control.machines.roster import MemberRecord
from paceline.control.messages.members import Introduction, Serving
from paceline.control.messages.plan import Phase
from paceline.control.messages.progress import Progress, Recorded, WorkerRow
from paceline.placement.placement import Placement

logger = logging.getLogger("paceline.control")

EVERY_S = 0.25
MEMBERS_EVERY_S = 1.0
SERVING = "serving"  # the phase of a server that holds ranges


class Recorder:
    """`look` gives the states of all members and the values of the run's table, under the lock of the machine; `answer`
    tells a member what is recorded."""

    def __init__(
        self,
        journal: Journal,
        look: Callable[[], tuple[list[MemberRow], dict[str, str]]],
        answer: Callable[[str, Recorded], None],
    ) -> None:
        self._journal = journal
        self._look, self._answer = look, answer
        self._lock = threading.Lock()
        self._waiting: dict[str, Progress] = {}
        self._workers: dict[str, WorkerRow] = {}
        self._last_line: dict[str, int] = {}  # the number of each worker's last line that is recorded
        self._written: dict[str, object] = {}  # what the database holds, to write changes only
        self._looks_at = 0.0
        self._complained = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-recorder", daemon=True)
        self._thread.start()

    def add(self, progress: Progress) -> None:
        """From any thread; does not wait."""
        with self._lock:
            self._waiting[progress.member] = progress

    def halt(self) -> None:
        """Write no more."""
        self._ending.set()
        self._thread.join()

    def close(self, last: dict[str, str]) -> None:
        """Write what is left, and these last values of the run."""
        self.halt()
        self._write(last)

    def _run(self) -> None:
        while not self._ending.wait(EVERY_S):
            self._write({})

    def _write(self, last: dict[str, str]) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, {}
        self._workers.update({name: row.worker for name, row in waiting.items() if row.worker is not None})
        members: list[MemberRow] = []
        run: dict[str, str] = {}
        if last or time.monotonic() >= self._looks_at:
            self._looks_at = time.monotonic() + MEMBERS_EVERY_S
            members, run = self._look()
            run |= last
            if num_epochs := max((worker.num_epochs for worker in self._workers.values()), default=0):
                run["fact/num_epochs"] = str(num_epochs)
            members = [self._with_speed(member) for member in members]
            members = [member for member in members if self._written.get(f"member {member.member}") != member]
            run = {key: value for key, value in run.items() if self._written.get(f"run {key}") != value}
        if not (waiting or members or run):
            return
        try:
            self._journal.record(
                self._journal.own(row for progress in waiting.values() for row in progress.steps),
                [row for progress in waiting.values() for row in progress.metrics],
                members,
                run,
                self._lines_of(waiting),
                needed=bool(last),
            )
            founding, operation, metric = self._journal.reached()
        except JournalError as error:
            self._keep(waiting, error)
            return
        self._complained = False
        for progress in waiting.values():
            self._last_line[progress.member] = max(
                [self._last_line.get(progress.member, 0), *(line.number for line in progress.lines)]
            )
        self._written.update({f"member {member.member}": member for member in members})
        self._written.update({f"run {key}": value for key, value in run.items()})
        for progress in waiting.values():
            self._answer(progress.member, Recorded(progress.number, founding, operation, metric))

    def _keep(self, waiting: dict[str, Progress], error: JournalError) -> None:
        with self._lock:
            self._waiting = waiting | self._waiting
        if not self._complained:
            self._complained = True
            logger.error("progress is not recorded: %s; workers keep it, and it is tried again", error)

    def _lines_of(self, waiting: dict[str, Progress]) -> list[Happening]:
        """What workers tell of, each once."""
        return [
            Happening(0, line.kind, progress.member, line.text)
            for progress in waiting.values()
            for line in progress.lines
            if line.number > self._last_line.get(progress.member, 0)
        ]

    def _with_speed(self, member: MemberRow) -> MemberRow:
        worker = self._workers.get(member.member)
        if worker is None:
            return member
        share = worker.share if member.rank >= 0 else 0
        return msgspec.structs.replace(
            member, share=share, samples_per_s=worker.samples_per_s, step_s=worker.step_s, starved=worker.starved
        )


def states_of(machine: Coordinator, names: Iterable[str] | None = None) -> list[MemberRow]:
    """All members, or those of these names, as the machine knows them."""
    plan = machine.standing.current or machine.standing.pending
    seats = {seat.member: (rank, seat.share) for rank, seat in enumerate(plan.seats)} if plan is not None else {}
    chosen = machine.records if names is None else {name: machine.records[name] for name in names}
    holdings = _holdings_of(machine.placement) if any(record.is_server for record in chosen.values()) else {}
    shared = _shared_names(machine.records.values())
    states = []
    for name, record in chosen.items():
        rank, share = seats.get(name, (-1, 0)) if record.fate is None else (-1, 0)
        introduction, report = record.introduction, record.report
        state = MemberRow(
            member=name,
            agent=introduction.agent,
            pid=introduction.pid,
            host=_host_of(introduction, shared),
            rank=rank,
            share=share,
            phase=report.phase.value,
            fate=record.fate.value if record.fate is not None else "",
            reason=record.reason,
            generation=report.working.generation,
            applied=report.working.applied,
            role=introduction.card.role,
        )
        states.append(_with_holdings(state, record, holdings) if record.is_server else state)
    return states


def described(state: MemberRow) -> dict[str, Any]:
    """For a command; the times are known to the journal alone."""
    found = msgspec.structs.asdict(state)
    del found["joined"], found["updated"]
    return found


def _shared_names(records: Iterable[MemberRecord]) -> set[str]:
    """The names that several hosts have."""
    addresses: dict[str, set[str]] = {}
    for record in records:
        addresses.setdefault(record.introduction.host, set()).add(record.introduction.card.address[0])
    return {name for name, found in addresses.items() if len(found) > 1}


def _host_of(introduction: Introduction, shared: Collection[str]) -> str:
    """The name of its host, for people; with the address where it is not the only host of that name."""
    name = introduction.host
    return f"{name} ({introduction.card.address[0]})" if name in shared else name


class _Holdings(NamedTuple):
    """How many ranges a server is primary of, backup of, and still gets."""

    ranges: int = 0
    backups: int = 0
    arriving: int = 0


def _holdings_of(placement: Placement) -> dict[str, _Holdings]:
    primaries = Counter(replicas.primary.server for replicas in placement.ranges)
    backups = Counter(one.server for replicas in placement.ranges for one in replicas.backups)
    arriving = num_arriving(placement)
    return {
        name: _Holdings(primaries[name], backups[name], arriving.get(name, 0))
        for name in {*primaries, *backups, *arriving}
    }


def _with_holdings(state: MemberRow, record: MemberRecord, holdings: Mapping[str, _Holdings]) -> MemberRow:
    """What a server holds, if it lives; of one that is ready, whether it serves or is about to leave."""
    if record.fate is not None:
        return state
    held = holdings.get(state.member, _Holdings())
    phase = state.phase
    if record.is_going:
        phase = Phase.LEAVING.value
    elif phase == Phase.READY.value and any(held):
        phase = SERVING
    serving = record.report.serving or Serving()
    return msgspec.structs.replace(
        state,
        phase=phase,
        **held._asdict(),
        num_keys=serving.num_keys,
        num_bytes=serving.num_bytes,
        busy=round(serving.busy, 2),
        staleness=",".join(map(str, serving.staleness)),
    )
