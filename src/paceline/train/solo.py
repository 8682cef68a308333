"""A run of one: the machine of a member with nobody to talk to. No server, no port, no thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from paceline.control.machines.member import Member
from paceline.control.machines.member_events import Action, Event, SendReport
from paceline.control.messages.members import Directive, Verdict
from paceline.control.messages.plan import Phase, Plan, PlanStart, Seat
from paceline.control.messages.progress import ProgressKeeper
from paceline.wire.card import Card

Answer = TypeVar("Answer")


class Solo:
    """Gives the machine the one plan there can be, and lets it go at the end."""

    def __init__(self, machine: Member, card: Card, base: int, act: Callable[[Action], None]) -> None:
        self.progress = ProgressKeeper(machine.name, is_kept=False)
        self._machine = machine
        self._plan = Plan(1, PlanStart.FOUND, (Seat(card),), base)
        self._act = act
        self._lock = threading.RLock()
        self._number = 0

    def post(self, event: Event) -> None:
        with self._lock:
            actions = self._machine.handle(event)
            if any(isinstance(action, SendReport) for action in actions):
                actions = [*actions, *self._answer()]
        for action in actions:
            if not isinstance(action, SendReport):
                self._act(action)

    def _answer(self) -> list[Action]:
        phase = self._machine.phase
        self._number += 1
        if phase is Phase.READY and self._machine.plan is None:
            directive = Directive(1, self._number, self._machine.name, Verdict.KNOWN, plan=self._plan)
        elif phase is Phase.ENDED:
            directive = Directive(1, self._number, self._machine.name, Verdict.RELEASED, "the end")
        else:
            directive = Directive(1, self._number, self._machine.name, Verdict.KNOWN, stop=self._machine.leaving)
        return self._machine.handle(directive)

    def look(self, question: Callable[[Member], Answer]) -> Answer:
        with self._lock:
            return question(self._machine)

    def unheard_s(self) -> float:
        return 0.0

    def close(self, flush_s: float = 0.0) -> None:
        """Nobody to say goodbye to."""


def own_card(member: str) -> Card:
    return Card(member, "worker", "", ("", 0), "", b"", False, ())
