"""The agent's machine in a test's hands: a clock that the test moves, process ids, and what the machine did."""

from __future__ import annotations

import signal

from paceline.control.messages.agents import AgentDirective
from paceline.engine.events import Action, Event, Opened, ProcessStarted, Signal, StartProcess
from paceline.engine.slots import AgentRules
from paceline.engine.supervisor import Supervisor

KILLED = -signal.SIGKILL


class Driver:
    """A machine, a clock, and process ids."""

    def __init__(self, **rules: object) -> None:
        self.machine = Supervisor(AgentRules(**rules))  # type: ignore[arg-type]
        self.now = 100.0
        self.log: list[Action] = []
        self._pid = 1000
        self._follow(self.machine.begin(self.now))

    def _follow(self, actions: list[Action]) -> list[Action]:
        self.log += actions
        for action in actions:
            if isinstance(action, StartProcess):
                self._pid += 1
                self._follow(self.machine.handle(ProcessStarted(action.slot, self._pid), self.now))
        return actions

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.now += after_s
        return self._follow(self.machine.handle(event, self.now))

    def open_all(self) -> None:
        for slot in self.machine.slots:
            self.tell(Opened(slot.number))

    def directive(self, number: int, *, kill: tuple[int, ...] = (), over: bool = False, reason: str = "") -> None:
        self.tell(AgentDirective(1, number, "agent", kill, over, reason))


def starts(actions: list[Action]) -> list[int]:
    return [action.slot for action in actions if isinstance(action, StartProcess)]


def sent(actions: list[Action]) -> list[tuple[int, int]]:
    return [(action.slot, action.number) for action in actions if isinstance(action, Signal)]
