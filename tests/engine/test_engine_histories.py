"""The agent's machine in many random histories of a simulated world; and the same histories without their servers."""

from __future__ import annotations

import random
import signal

import msgspec
import pytest

from paceline.control.messages.agents import AgentDirective
from paceline.engine.events import (
    Action,
    AgentTick,
    AskHalt,
    CoordinatorEnded,
    Event,
    Exited,
    Opened,
    PrintLine,
    ProcessStarted,
    Signal,
    SignalCoordinator,
    StartCoordinator,
    StartProcess,
    StopAsked,
)
from paceline.engine.outcome import SupervisorStage
from paceline.engine.slots import AgentRules
from paceline.engine.supervisor import Supervisor
from tests.engine.driver import KILLED


class World:
    """Workers, servers, a coordinator and a person that behave as the dice say; checks what must always hold."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.owns = self.dice.random() < 0.8
        self.sessions = self.dice.random() < 0.7
        self.deadly = self.dice.choice([0.0, 0.02, 0.1])
        servers = self.dice.choice([0, 1, 3])
        alone = servers > 0 and not self.owns and self.dice.random() < 0.3
        self.rules = AgentRules(
            workers=0 if alone else self.dice.randint(1, 5),
            servers=servers,
            restarts=self.dice.randint(0, 4),
            owns_coordinator=self.owns,
        )
        self.machine = Supervisor(self.rules)
        self.history: list[tuple[Event, float, list[Action]]] = []
        self.now, self.pid = 0.0, 0
        self.living: dict[int, int] = {}
        self.opened: set[int] = set()
        self.stubborn = {slot for slot in range(8) if self.dice.random() < 0.3}
        self.coordinator: str | None = None
        self.halting = self.over = self.forbidden = False
        self.last_exit: dict[int, tuple[float, int]] = {}
        self.started_at: dict[int, float] = {}
        self.in_a_row: dict[int, int] = {}
        self.number = 0
        self.doomed: tuple[int, ...] = ()

    def run(self) -> None:
        self._act(self.machine.begin(self.now))
        for _ in range(3000):
            if self.machine.outcome is not None:
                assert not self.living
                assert self.coordinator is None
                return
            self.now += self.dice.choice([0.01, 0.1, 0.5])
            self._tell(AgentTick())
            self._happen()
        raise AssertionError(f"no end: {self.machine.stage}, {self.living}, {self.coordinator}")

    def _tell(self, event: Event) -> None:
        actions = self.machine.handle(event, self.now)
        self.history.append((event, self.now, actions))
        self._act(actions)

    def _is_server(self, slot: int) -> bool:
        return slot >= self.rules.workers

    def _is_plain_end(self) -> bool:
        return not self.sessions and self.rules.workers > 0 and self.machine.is_spent

    def _workers_living(self) -> list[int]:
        return [slot for slot in self.living if not self._is_server(slot)]

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, StartProcess):
                self._start(action.slot)
            elif isinstance(action, Signal):
                self._signal(action.slot, action.number)
            elif isinstance(action, StartCoordinator):
                assert self.coordinator is None
                self.coordinator = "starting"
            elif isinstance(action, SignalCoordinator):
                self._end_coordinator(-action.number if action.number == signal.SIGKILL else 75, "")
            elif isinstance(action, AskHalt):
                self.halting = True

    def _start(self, slot: int) -> None:
        assert slot not in self.living
        assert not self.forbidden, "started after the end was known"
        assert not self._is_plain_end(), "a server was started for a script that has ended"
        if slot in self.last_exit:
            at, code = self.last_exit[slot]
            assert code != 0
            assert self.now - at >= self.rules.first_pause_s - 1e-6
            long_life = at - self.started_at[slot] >= self.rules.settled_s
            self.in_a_row[slot] = 1 if long_life else self.in_a_row.get(slot, 0) + 1
            assert self.in_a_row[slot] <= self.rules.restarts
        self.pid += 1
        self.living[slot] = self.pid
        self.started_at[slot] = self.now
        self._tell(ProcessStarted(slot, self.pid))

    def _signal(self, slot: int, number: int) -> None:
        if self._is_server(slot) and not self.forbidden and self.machine.stage is SupervisorStage.WORKING:
            doomed = self.living.get(slot) in self.doomed
            assert doomed or self._is_plain_end(), "a server was ended while the run went on"
        if slot in self.living and (
            number == signal.SIGKILL or (number in (signal.SIGTERM, signal.SIGINT) and slot not in self.stubborn)
        ):
            self._exit(slot, -number)

    def _exit(self, slot: int, code: int) -> None:
        del self.living[slot]
        self.opened.discard(slot)
        self.last_exit[slot] = (self.now, code)
        self._tell(Exited(slot, code))

    def _end_coordinator(self, code: int, verdict: str) -> None:
        if self.coordinator is not None:
            self.coordinator = None
            self._tell(CoordinatorEnded(code, verdict))

    def _happen(self) -> None:
        for slot in list(self.living):
            if slot not in self.living:
                continue
            takes_ticket = self.sessions or self._is_server(slot)
            if takes_ticket and slot not in self.opened and self.dice.random() < 0.3:
                self.opened.add(slot)
                self._tell(Opened(slot))
            elif self.dice.random() < self.deadly:
                self._exit(slot, self.dice.choice([KILLED, 1, 75, -15]))
            elif self._is_server(slot):
                if self.dice.random() < (0.2 if self.over else 0.002):  # released, or asked to leave
                    self._exit(slot, 0)
            elif (self.halting or self.over or not self.sessions) and self.dice.random() < 0.2:
                self._exit(slot, 0)
        if self.dice.random() < 0.004:
            self.forbidden = True
            self._tell(StopAsked(self.dice.choice([signal.SIGINT, signal.SIGTERM])))
        self._be_coordinator()

    def _be_coordinator(self) -> None:
        if not self.owns:
            if self.dice.random() < 0.01:
                self._say_over()
            return
        if self.coordinator == "starting" and self.dice.random() < 0.2:
            self.coordinator = "running"
        if self.coordinator != "running":
            return
        self._direct(over=self.over)
        if self.over and self.dice.random() < 0.3:
            self._end_coordinator(*((0, "ended") if self.dice.random() < 0.7 else (1, "failed")))
        elif self.dice.random() < 0.01:
            self._end_coordinator(KILLED, "")
        elif (self.halting and not self._workers_living()) or self.machine.exhausted or self.dice.random() < 0.005:
            self._say_over()

    def _say_over(self) -> None:
        self.over = self.forbidden = True
        self._direct(over=True)

    def _direct(self, *, over: bool) -> None:
        self.number += 1
        self.doomed = tuple(pid for pid in self.living.values() if self.dice.random() < 0.002)
        self._tell(AgentDirective(1, self.number, "agent", self.doomed, over, "reason" if over else ""))
        self.doomed = ()


def check_that_servers_decide_nothing(world: World) -> None:
    """The same history without its servers: workers and the coordinator are treated alike until the end."""
    rules, ours = msgspec.structs.replace(world.rules, servers=0), range(world.rules.workers)
    alone = Supervisor(rules)
    alone.begin(0.0)
    for number, (event, now, actions) in enumerate(world.history):
        is_of_server = isinstance(event, ProcessStarted | Opened | Exited) and event.slot not in ours
        expected = alone.handle(AgentTick() if is_of_server else event, now)
        assert _without_servers(actions, ours) == _without_servers(expected, ours), event
        if alone.outcome is not None:
            # A person who does not wait for the servers has another end.
            if not any(isinstance(later, StopAsked) for later, _, _ in world.history[number + 1 :]):
                assert world.machine.outcome is not None
                assert world.machine.outcome[:3] == alone.outcome[:3]
            return
    raise AssertionError(f"no end without servers: {alone.stage}")


def _without_servers(actions: list[Action], ours: range) -> list[Action]:
    others = [action for action in actions if not isinstance(action, PrintLine)]
    return [action for action in others if not isinstance(action, StartProcess | Signal) or action.slot in ours]


@pytest.mark.parametrize("block", range(10))
def test_random_histories_end_and_keep_the_rules(block: int) -> None:
    for seed in range(block * 200, block * 200 + 200):
        world = World(seed)
        try:
            world.run()
            if world.rules.workers:
                check_that_servers_decide_nothing(world)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
