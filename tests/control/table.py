"""The coordinator's machine in a test's hands."""

from __future__ import annotations

from typing import Any

from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Event, Remember, RunSettings
from paceline.control.machines.roster import Fate
from paceline.control.messages.members import Introduction, Report, Working
from paceline.control.messages.plan import Phase
from paceline.wire.card import Card


def report_of(member: str, number: int, term: int, phase: Phase, **fields: Any) -> Report:
    """A report; what a worker says of its work is among the fields."""
    working = {name: fields.pop(name) for name in Working.__struct_fields__ if name in fields}
    return Report(member, number, term, phase, working=Working(**working), **fields)


WORKING: dict[str, Any] = {"phase": Phase.ACTIVE, "plan": 1, "formed": 1, "generation": 1, "fenced": 1, "applied": 5}


class Table:
    """A coordinator and what members say to it."""

    def __init__(self, settings: RunSettings = RunSettings(wanted=2, fewest=2)) -> None:
        self.now = 0.0
        self._numbers: dict[str, int] = {}
        self._memory: dict[str, bytes] = {}
        self._settings = settings
        self.machine = Coordinator(self._settings, self.now)

    def report(self, member: str, facts: Any = None, slot: Any = 0, **fields: Any) -> None:
        number = self._numbers[member] = self._numbers.get(member, 0) + 1
        card = Card(member, "worker", "h", ("", 0), "", b"", False, ())
        introduction = Introduction(card, self.pid_of(member), "h", "", facts or {}, slot=slot)
        self.handle(report_of(member, number, 1, introduction=introduction, **fields))

    @staticmethod
    def pid_of(member: str) -> int:
        return sum(map(ord, member))

    def handle(self, event: Event) -> None:
        self.now += 0.01
        for action in self.machine.handle(event, self.now):
            if isinstance(action, Remember) and action.value is not None:
                self._memory[action.key] = action.value

    def restart(self) -> None:
        self.machine = Coordinator(self._settings, self.now, self._memory)

    def fate_of(self, member: str) -> Fate | None:
        return self.machine.records[member].fate
