"""What the driver of the coordinator's machine chooses, purely: which events the machine sees, which directives carry
their plan, and which leases are written down with a transaction.

Events come in crowds: of several reports of one member only the newest counts, and a lost connection is no news of a
member that has another one by now. A plan is large: it is left out of a directive while the same plan must be on its
way to that member, on the connection that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from paceline.control.machines.coordinator_events import (
    Action,
    Connected,
    Count,
    Disconnected,
    Event,
    Remember,
    TellLeases,
)
from paceline.control.messages.members import Directive, Report
from paceline.control.messages.progress import StepRow

PLAN_AGAIN_S = 2.0  # a plan that a member does not say that it has is sent again after so long


class Choices:
    def __init__(self, plan_again_s: float = PLAN_AGAIN_S) -> None:
        self._plan_again_s = plan_again_s
        self._on_the_way: dict[str, tuple[int, float]] = {}  # which plan a member's connection got, and when
        self._counted: list[StepRow] = []  # leases that are done, and not recorded yet

    def merge(self, events: Sequence[Event], has_line: Callable[[str], bool]) -> list[Event]:
        """What the machine is to handle of a batch, in its order; `has_line` says who is connected now."""
        chosen: list[Event] = []
        newest = {event.member: event for event in events if isinstance(event, Report)}
        for event in events:
            if isinstance(event, Report) and newest[event.member] is not event:
                continue
            if isinstance(event, Disconnected) and has_line(event.member):
                continue  # it is back
            if isinstance(event, Connected):
                self._on_the_way.pop(event.member, None)
            chosen.append(event)
        return chosen

    def lighten(self, directive: Directive, now: float) -> Directive:
        """The directive as it is to be sent: without a plan that must be on its way."""
        plan = directive.plan
        if plan is None:
            return directive
        generation, sent = self._on_the_way.get(directive.member, (0, 0.0))
        if generation == plan.generation and now - sent < self._plan_again_s:
            return msgspec.structs.replace(directive, plan=None)
        self._on_the_way[directive.member] = (plan.generation, now)
        return directive

    def rows_due(self, actions: Iterable[Action]) -> list[StepRow]:
        """The leases to record before anything else is written: they wait for a transaction that is made anyway, but
        are there before anybody hears that they need not be said again."""
        actions = list(actions)
        self._counted += [row for action in actions if isinstance(action, Count) for row in action.rows]
        is_finished = any(isinstance(action, TellLeases) and action.grant.is_finished for action in actions)
        if not is_finished and not any(isinstance(action, Remember) for action in actions):
            return []
        due, self._counted = self._counted, []
        return due
