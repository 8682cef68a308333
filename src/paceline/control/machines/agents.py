"""What the agents say of their processes, as the coordinator knows it: who exited, who is busy, who is to be killed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.agents import AgentReport

_STANDS_STILL = "TtZX"  # states of a process that does nothing, whatever it did before


class Starting(msgspec.Struct, frozen=True, array_like=True):
    """A process that lives and has not joined."""

    agent: str
    pid: int
    is_server: bool


class Agents:
    def __init__(self) -> None:
        self._reports: dict[str, AgentReport] = {}
        self._heard: dict[str, float] = {}
        self._told: dict[str, object] = {}

    def take(self, report: AgentReport, now: float) -> bool:
        """A report; whether a decision could depend on it."""
        known = self._reports.get(report.agent)
        if known is not None and known.number >= report.number:
            return False
        self._reports[report.agent] = report
        self._heard[report.agent] = now
        return known is None or _decisive(report) != _decisive(known)

    def exit_of(self, record: MemberRecord) -> str | None:
        """How the process of a member ended, if it did."""
        report = self._reports.get(record.introduction.agent)
        return report.exits.get(record.introduction.pid) if report is not None else None

    def is_busy(self, record: MemberRecord, since: float) -> bool:
        """Whether an agent that was heard since then sees the process compute: then it is slow, not dead."""
        report = self._reports.get(record.introduction.agent)
        if report is None or self._heard[report.agent] < since:
            return False
        vitals = report.living.get(record.introduction.pid)
        return vitals is not None and vitals.busy and vitals.state not in _STANDS_STILL

    def are_spent(self) -> bool:
        """No agent has a worker, or will start one."""
        reports = self._reports.values()
        return bool(reports) and all(report.exhausted and not report.num_workers for report in reports)

    def may_bring_more(self, num_ready: int) -> bool:
        """Whether a worker lives, or may be started yet, that is not among those that are ready."""
        reports = self._reports.values()
        if reports and all(report.num_expected >= 0 for report in reports):
            return sum(report.num_expected for report in reports) > num_ready
        if not reports or not all(report.exhausted for report in reports):
            return True
        return sum(report.num_workers for report in reports) > num_ready

    def have_come(self, alive: Iterable[MemberRecord]) -> bool:
        """Whether the agents of these members have been heard of."""
        return {record.introduction.agent for record in alive} - {""} <= self._reports.keys()

    def see_unknown(self, alive: Iterable[MemberRecord]) -> bool:
        """Whether an agent sees a worker alive that is none of these."""
        return any(not one.is_server for one in self.starting(alive))

    def starting(self, known: Iterable[MemberRecord]) -> list[Starting]:
        """Processes that live, and are none of these members: they are being started, and have not joined yet."""
        members = {(record.introduction.agent, record.introduction.pid) for record in known}
        return [
            Starting(report.agent, pid, pid in report.servers)
            for report in self._reports.values()
            for pid in sorted(report.living)
            if (report.agent, pid) not in members
        ]

    def last_exit(self) -> str:
        exits = [text for report in self._reports.values() for text in report.exits.values()]
        return exits[-1] if exits else ""

    def doomed(self, agent: str, records: Iterable[MemberRecord]) -> tuple[int, ...]:
        """The processes of an agent that are to be killed: they were evicted, and live."""
        living = self._reports[agent].living
        evicted = (record.introduction for record in records if record.fate is Fate.EVICTED)
        return tuple(sorted(who.pid for who in evicted if who.agent == agent and who.pid in living))

    def lost(self, agent: str, records: Iterable[MemberRecord]) -> tuple[int, ...]:
        """The processes of an agent that ended while the run counted on them."""
        exits = self._reports[agent].exits
        dead = (record.introduction for record in records if record.fate is Fate.DEAD)
        return tuple(sorted(who.pid for who in dead if who.agent == agent and who.pid in exits))

    def refused(self, agent: str, records: Iterable[MemberRecord]) -> dict[int, str]:
        """The processes of an agent that do not fit the run, each with what differs: others would not fit either."""
        found = (record for record in records if record.fate is Fate.REFUSED and record.introduction.agent == agent)
        return {record.introduction.pid: record.reason for record in found}

    def is_told(self, agent: str, orders: object) -> bool:
        """Whether an agent was told just this; from now on it counts as told."""
        before, self._told[agent] = self._told.get(agent), orders
        return before == orders

    def __iter__(self) -> Iterator[str]:
        return iter(self._reports)


def _decisive(report: AgentReport) -> tuple[object, ...]:
    return report.exits, report.exhausted, report.servers_exhausted, report.num_expected
