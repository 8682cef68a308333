"""The coordinator's process: the real machine, the driver's real choices, a journal, and a head that may stand still.

Events wait until it looks, and are handled in batches. It may be stopped between any two of: reading its clock,
deciding, remembering, speaking. When it crashes, what it remembered is there, and what it was about to say is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import (
    Action,
    AdoptLeases,
    Event,
    Note,
    Remember,
    RunOver,
    RunSettings,
    Tell,
    TellAgent,
    TellLeases,
    Tick,
)
from paceline.control.machines.roster import Fate
from paceline.control.machines.server_manager import Aim
from paceline.placement.placement import Placement
from paceline.wire.decoding import decode

if TYPE_CHECKING:
    from paceline.testing.joint.world import World

TICK_S = 0.1
PLAN_AGAIN_S = 0.6


class Head:
    def __init__(self, world: World, settings: RunSettings) -> None:
        self._world = world
        self.settings = settings
        self.machine: Coordinator | None = None
        self.journal: dict[str, bytes] = {}
        self.rows: set[tuple[int, int]] = set()  # (epoch, position) that the run's database has
        self.over: RunOver | None = None
        self.is_stopped = False
        self.crashes_soon = False  # the next time that something was remembered and not said yet
        self.stops_soon = 0.0  # for so long, the next time that it has looked at its clock
        self.has_lost_journal = False
        self._was_halting = False  # when the journal was lost
        self.had_plan = False  # before the events that it handles
        self._parted: set[str] = set()  # members that were gone when it was lost
        self._founded = 0
        self._choices = Choices(PLAN_AGAIN_S)
        self._inbox: list[Event] = []
        self._looks = False
        self._unsaid: list[Action] = []
        self._version = 0
        self._incarnation = 0
        self.start()

    # -- the process -------------------------------------------------------------------------------------------------

    @property
    def is_listening(self) -> bool:
        return self.machine is not None  # one that is stopped has its connections made by the kernel

    def start(self) -> None:
        if self.machine is not None:
            return
        world = self._world
        self._incarnation += 1
        self.machine = world.mutation.coordinator(
            self.settings,
            world.now,
            dict(self.journal),
            "a",
            is_again=self._incarnation > 1,
            born=self._incarnation * 1_000_000,
        )
        self._choices = world.mutation.choices(PLAN_AGAIN_S)
        self._inbox, self._unsaid, self._looks = [], [], False
        self.is_stopped = self.crashes_soon = False
        self._handle([], self.machine.take_actions())
        world.after(world.random.random() * TICK_S, self._tick, self._incarnation)

    def crash(self) -> None:
        if self.machine is None:
            return
        self.machine = None
        self.is_stopped = self.crashes_soon = False
        for line in self._world.lines():
            line.drop(is_heard=False)

    def lose_journal(self) -> None:
        """Somebody deletes the run's database, and the coordinator dies: all that is known then is with the members."""
        records = self.remembered().records.values()
        self._parted |= {record.member for record in records if record.fate is not None}
        self._was_halting = self.is_halting
        self.crash()
        self.journal.clear()
        self.rows.clear()
        self._founded = 0
        self.has_lost_journal = True
        self._world.checks.forgotten()

    def stop(self, seconds: float) -> None:
        if self.machine is not None and not self.is_stopped:
            self.is_stopped = True
            self._world.after(seconds, self._go_on, self._incarnation)

    def _go_on(self, incarnation: int) -> None:
        if incarnation == self._incarnation and self.is_stopped:
            self.is_stopped = False
            unsaid, self._unsaid = self._unsaid, []
            self._speak(unsaid)
            # Its threads wake in any order: the one that ticks, and those that have something to read.
            self._inbox.insert(self._world.random.randint(0, len(self._inbox)), Tick())
            self._look()

    def _tick(self, incarnation: int) -> None:
        if self.machine is None or incarnation != self._incarnation or self._world.is_finished:
            return
        if not self.is_stopped:
            self.post(Tick())
        self._world.after(TICK_S, self._tick, incarnation)

    # -- events ------------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        if self.machine is None:
            return
        self._inbox.append(event)
        if not self._looks and not self.is_stopped:
            self._looks = True
            random = self._world.random.random
            self._world.after(random() * 0.002 if random() < 0.7 else 0.02 * random(), self._look)

    def _look(self) -> None:
        """Handle what is there, all of it or, when it wakes, a part."""
        self._looks = False
        if self.machine is None or self.is_stopped or not self._inbox:
            return
        world = self._world
        count = len(self._inbox)
        if count > 1 and world.random.random() < 0.3:
            count = world.random.randint(1, count)
        batch, self._inbox = self._inbox[:count], self._inbox[count:]
        clock = world.now
        self.had_plan = self.machine.standing.current is not None
        chosen = self._choices.merge(batch, self._has_line)
        actions = self.machine.handle_all(chosen, clock) if chosen else []
        if actions:
            self._handle(chosen, actions)
        if self._inbox and self.machine is not None and not self.is_stopped:
            self._looks = True
            world.after(world.random.random() * 0.002, self._look)

    def _has_line(self, name: str) -> bool:
        process = self._world.processes.get(name)
        return process is not None and process.line.is_up

    def _handle(self, events: list[Event], actions: list[Action]) -> None:
        assert self.machine is not None
        self._remember(actions)
        if self.crashes_soon and any(isinstance(action, Remember) for action in actions):
            self.crash()
            self._world.faults.coordinator_crashed()
            return
        if self.stops_soon:
            self._unsaid = actions
            seconds, self.stops_soon = self.stops_soon, 0.0
            self.stop(seconds)
            return
        self._speak(actions)

    def _remember(self, actions: list[Action]) -> None:
        self.rows.update((row.epoch, row.position) for row in self._choices.rows_due(actions))
        for action in actions:
            if isinstance(action, AdoptLeases):
                self.rows.update((row.epoch, row.position) for row in action.rows)
            elif isinstance(action, Remember):
                if action.value is None:
                    self.journal.pop(action.key, None)
                else:
                    self.journal[action.key] = action.value
            elif isinstance(action, Note):
                self._world.noted(action)
        assert self.machine is not None
        placement = self.machine.placement
        aims = [action.value for action in actions if isinstance(action, Remember) and action.key == "aim"]
        if aims and aims[-1] is not None:
            self._world.checks.aimed(decode(aims[-1], Aim), placement)
        if self.machine.standing.founded > self._founded:
            self._founded = self.machine.standing.founded
            self._world.checks.founds(self.machine.standing)
        if placement.version > self._version:
            self._version = placement.version
            self._world.placed(placement)

    def _speak(self, actions: list[Action]) -> None:
        world = self._world
        for action in actions:
            if isinstance(action, Tell):
                directive = self._choices.lighten(action.directive, world.now)
                kind = "plan" if directive.plan is not None else "directive"
                world.processes[directive.member].line.put(kind, directive)
            elif isinstance(action, TellLeases):
                world.processes[action.grant.member].line.put("leases", action.grant)
            elif isinstance(action, TellAgent):
                world.agents[action.directive.agent].line.put("directive", action.directive)
            elif isinstance(action, RunOver) and self.over is None:
                self.over = action
                world.finished(action)

    # -- looking -----------------------------------------------------------------------------------------------------

    def remembered(self) -> Coordinator:
        """The machine, or what it would be if it came back now."""
        return self.machine or Coordinator(self.settings, self._world.now, dict(self.journal), "a")

    def counts(self, name: str) -> bool:
        """Whether a member is in the run, as far as the coordinator would remember."""
        record = self.remembered().records.get(name)
        if record is None and self.has_lost_journal:
            return name not in self._parted
        return record is not None and record.fate in (None, Fate.RELEASED)

    def counts_now(self, name: str) -> bool:
        """The same, and it was not let go."""
        record = self.remembered().records.get(name)
        return self.counts(name) and (record is None or record.fate is None)

    @property
    def is_halting(self) -> bool:
        """Whether somebody has asked for the end of the run."""
        return self._was_halting or bool(self.remembered().standing.halting)

    @property
    def has_no_plan(self) -> bool:
        return self.machine is not None and self.machine.standing.current is None

    @property
    def placement(self) -> Placement:
        value = self.journal.get("placement")
        if self.machine is not None:
            return self.machine.placement
        return decode(value, Placement) if value is not None else Placement()


def phase_of(machine: Coordinator | None) -> str:
    """What the run was at, for the table of what was tried."""
    if machine is None:
        return "headless"
    standing = machine.standing
    if standing.over or standing.halting or _is_ending(machine):
        return "ending"
    if standing.current is None:
        return "gathering"
    if standing.fence > standing.newest:
        return "recovering"
    if any(one.joining or one.handing for one in machine.placement.ranges):
        return "moving"
    if standing.pending is not None:
        return "switching"
    return "running" if machine.census.all_work_in(standing.current) else "starting"


def _is_ending(machine: Coordinator) -> bool:
    return any(record.report.phase.value == "ended" for record in machine.records.values())
