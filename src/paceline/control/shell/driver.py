"""Drives the coordinator's machine: events in, and what follows from them on disk first, then on its way.

One lock guards the machine; it is held for a transaction, never for a peer. Who finds it taken leaves its event in a
queue, and the holder, or the ticking thread, takes all that is there at once: a thousand threads never stand in line,
and a crowd of events costs one transaction. What it chooses of events and directives is in `choices`.

Failure: when the journal fails, nothing of that batch is said and no later event is handled; `failure` says why.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec

from paceline.control.journal.journal import Happening, Journal, JournalError
from paceline.control.journal.recorder import states_of
from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import (
    Action,
    AdoptLeases,
    Event,
    Note,
    Remember,
    RunOver,
    Tell,
    TellAgent,
    TellLeases,
)
from paceline.control.machines.placement_news import PlacementNews
from paceline.control.messages.members import Directive
from paceline.control.shell.switchboard import Switchboard
from paceline.control.tracebacks import without_frames
from paceline.errors import ConnectionLost

logger = logging.getLogger("paceline.control")


class Driver:
    """`post` and `standing_still` from any thread; `alarm` is rung when the ticking thread should `work_off` events, or
    see that the driver failed."""

    def __init__(
        self, machine: Coordinator, journal: Journal, members: Switchboard, agents: Switchboard, alarm: threading.Event
    ) -> None:
        self.failure: JournalError | None = None
        self.over: RunOver | None = None
        self.machine = machine
        self._journal = journal
        self._members, self._agents = members, agents
        self._alarm = alarm
        self._lock = threading.Lock()
        self._events: deque[Event] = deque()
        self._newest = machine.standing.newest
        self._moves = PlacementNews(machine.placement)
        self._plan_on_wire: tuple[int, msgspec.Raw] = (0, msgspec.Raw())
        self._choices = Choices()

    def post(self, event: Event) -> None:
        """Let the machine handle an event, here or, if it is busy, by who is at it: a thread waits neither for the
        machine nor for the disk of others. Raises `ConnectionLost` once the journal has failed."""
        if self.failure is not None:
            raise ConnectionLost("this coordinator ends")
        self._events.append(event)
        if self.work_off() and self._events:
            self._alarm.set()  # more came meanwhile: that is for the ticking thread, this one has a peer

    def work_off(self) -> bool:
        """Handle the events that are there, unless another thread is at it, which then is to look again; whether this
        one did. What is left after it came in meanwhile."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._handle_all([self._events.popleft() for _ in range(len(self._events))])
        finally:
            self._lock.release()
        return True

    def _handle_all(self, events: list[Event]) -> None:
        """Events, in their order; what follows from all of them is remembered in one transaction, then said."""
        chosen = self._choices.merge(events, self._members.has_line)
        actions = self.machine.handle_all(chosen, time.monotonic()) if chosen else []
        if not actions or self.failure is not None:
            return
        try:
            self._remember(actions)
        except JournalError as error:
            self.failure = error
            self._alarm.set()
            return
        for action in actions:
            if isinstance(action, Tell):
                self._tell(action.directive)
            elif isinstance(action, TellLeases):
                self._members.put(action.grant.member, "leases", action.grant)
            elif isinstance(action, TellAgent):
                self._agents.put(action.directive.agent, "directive", action.directive)
            elif isinstance(action, RunOver):
                self.over = action
            elif isinstance(action, Note):
                logger.info("%s %s: %s", action.kind, action.member, action.text)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[Coordinator]:
        """The machine, for a look."""
        with self._lock:
            yield self.machine
        if self._events:
            self._alarm.set()

    def _remember(self, actions: list[Action]) -> None:
        changes = {action.key: action.value for action in actions if isinstance(action, Remember)}
        term = self.machine.standing.term
        notes = [action for action in actions if isinstance(action, Note)]
        # A traceback as a whole is in the log of its worker, and in this process's own.
        happenings = [Happening(term, note.kind, note.member, without_frames(note.text)) for note in notes]
        happenings += [Happening(term, "placement", "", text) for text in self._moves.news(self.machine.placement)]
        # Who reads of a newcomer finds it among the members.
        newcomers = states_of(self.machine, [note.member for note in notes if note.kind == "joined"])
        standing = self.machine.standing
        plans = [plan for plan in (standing.current, standing.pending) if plan and plan.generation > self._newest]
        if rows := self._choices.rows_due(actions):
            self._journal.patiently(lambda: self._journal.record(rows, needed=True))
        for adopted in [action.rows for action in actions if isinstance(action, AdoptLeases)]:
            self._journal.patiently(functools.partial(self._journal.adopt, adopted))
        if changes or happenings or plans:
            self._journal.commit(changes, happenings, plans, newcomers)
            self._newest = max([self._newest, *(plan.generation for plan in plans)])

    def _tell(self, directive: Directive) -> None:
        """A plan is encoded once, not once for each of its members. It goes under a kind of its own, so that a newer
        directive without it does not replace it."""
        directive = self._choices.lighten(directive, time.monotonic())
        plan = directive.plan
        if plan is None:
            self._members.put(directive.member, "directive", directive)
            return
        if self._plan_on_wire[0] != plan.generation:
            self._plan_on_wire = (plan.generation, msgspec.Raw(msgspec.msgpack.encode(plan)))
        self._members.put(directive.member, "plan", msgspec.structs.asdict(directive) | {"plan": self._plan_on_wire[1]})
