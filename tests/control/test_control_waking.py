"""A coordinator that stood still: whatever it finds first when it wakes, nobody that lives is taken for dead. Who is
silent is found out all the same."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Disconnected, Drain, Event, Remember, RunSettings, Tick
from paceline.control.machines.roster import Fate
from paceline.control.machines.waking_clock import WakingClock
from paceline.control.messages.agents import AgentReport, ProcessVitals
from paceline.control.messages.members import Introduction, Report
from paceline.control.messages.plan import NOTHING, Phase
from paceline.control.shell.service import TICK_S
from paceline.wire.card import Card
from tests.control.table import report_of

HEARTBEAT_S = 0.5
READING_S = 0.2  # within so long a coordinator that is awake has read what lies in its sockets
SETTINGS = RunSettings(wanted=3, fewest=1)


class Run:
    """A coordinator and three members, who say something every heartbeat; what is said to one that stands still waits.
    The dice choose what it reads first when it wakes, and how many of it at once."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.dice = random.Random(seed)
        self.machine = Coordinator(SETTINGS, self.now)
        self.speaking = dict.fromkeys("ABC", 0)  # the number of each one's last report
        self._memory: dict[str, bytes] = {}
        self._waiting: list[Event] = []
        self._beats_at = {name: 0.1 * number for number, name in enumerate("ABC")}
        self._agent_number = 0
        for phase in (Phase.READY, Phase.ACTIVE):
            for name in "ABC":
                self.handle([self._say(name, phase)])

    def _say(self, name: str, phase: Phase = Phase.ACTIVE) -> Report:
        self.speaking[name] += 1
        card = Card(name, "worker", "h", ("", 0), "", b"", False, ())
        introduction = Introduction(card, ord(name), "h", "agent")
        plan, applied = (0, NOTHING) if phase is Phase.READY else (1, 5)
        joinable = self.speaking[name] % 2 == 0  # so that something is decided on every report
        return report_of(
            name,
            self.speaking[name],
            1,
            phase,
            plan=plan,
            formed=plan,
            generation=plan,
            fenced=plan,
            applied=applied,
            joinable=joinable,
            introduction=introduction,
        )

    def _agent(self, state: str) -> AgentReport:
        self._agent_number += 1
        return AgentReport("agent", self._agent_number, {ord(name): ProcessVitals(state, False) for name in "ABC"})

    def handle(self, events: list[Event]) -> None:
        for action in self.machine.handle_all(events, self.now):
            if isinstance(action, Remember) and action.value is not None:
                self._memory[action.key] = action.value

    def restart(self) -> None:
        self.machine = Coordinator(SETTINGS, self.now, self._memory)

    def advance(self, until: float, *, awake: bool) -> None:
        """Time passes; members speak, and are read at once or not before it wakes."""
        while self.now < until:
            self.now = min(until, self.now + TICK_S)
            for name in self.speaking:
                if self.now >= self._beats_at[name]:
                    self._beats_at[name] = self.now + HEARTBEAT_S
                    self._waiting.append(self._say(name))
            if self.dice.random() < 0.3:
                self._waiting.append(self._agent("S"))
            if awake:
                self._read()

    def _read(self) -> None:
        """What waits, in parts, in an order that keeps only that of each speaker; a tick somewhere between."""
        ends_at = self.now + READING_S * self.dice.random()
        waiting, self._waiting = self._waiting, []
        self.dice.shuffle(waiting)
        events: list[Event] = sorted(waiting, key=lambda event: event.number if isinstance(event, Report) else 0)
        events.insert(self.dice.randint(0, len(events)), Tick())
        while events:
            count = self.dice.randint(1, len(events))
            self.handle(events[:count])
            events = events[count:]
            self.now = min(ends_at, self.now + 0.02)

    def lost(self) -> dict[str, Fate]:
        return {name: record.fate for name, record in self.machine.records.items() if record.fate is not None}


# A bit more than a heartbeat, around the deadline, far beyond it, and what counts as no pause at all.
PAUSES = st.one_of(st.floats(0.0, 0.7), st.floats(4.0, 6.0), st.floats(0.0, 100.0))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), times=st.lists(st.tuples(st.floats(0.0, 2.0), PAUSES), min_size=1, max_size=25))
def test_nobody_that_speaks_is_taken_for_dead_however_the_coordinator_is_paused(
    seed: int, times: list[tuple[float, float]]
) -> None:
    run = Run(seed)
    for awake_s, pause_s in times:
        run.advance(run.now + awake_s, awake=True)
        run.advance(run.now + pause_s, awake=False)
        if run.dice.random() < 0.3:  # stopped between a look at the clock and what it does then
            late, run.now = run.now, run.now - pause_s
            run.handle([Tick()])
            run.now = late
        first: list[Event] = [Drain("nobody"), Tick(), run._agent("T")]
        run.handle([run.dice.choice(first)])  # before it has heard anybody
        assert not run.lost()
    run.advance(run.now + 10.0, awake=True)
    assert not run.lost()


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), pauses=st.lists(PAUSES, max_size=8))
def test_who_is_silent_is_found_out_when_the_pauses_end(seed: int, pauses: list[float]) -> None:
    run = Run(seed)
    run.advance(2.0, awake=True)
    del run.speaking["B"]
    for pause_s in pauses:
        run.advance(run.now + pause_s, awake=False)
        run.advance(run.now + 0.3, awake=True)
    run.advance(run.now + SETTINGS.silence_s + SETTINGS.listen_s + 1.0, awake=True)
    assert run.lost() == {"B": Fate.EVICTED}


def test_who_fell_silent_before_a_pause_and_spoke_in_it_lives() -> None:
    """What it said lies in the socket: the deadline must not pass before that is read."""
    run = Run(0)
    run.advance(2.0, awake=True)
    number = run.speaking.pop("B")
    run.advance(run.now + SETTINGS.silence_s - HEARTBEAT_S - 0.2, awake=True)
    run.speaking["B"] = number
    run.advance(run.now + 2.0, awake=False)
    run.handle([Tick()])
    assert not run.lost()
    run.advance(run.now + 10.0, awake=True)
    assert not run.lost()


def test_a_connection_that_is_made_again_after_a_pause_is_no_death() -> None:
    """Members leave a line on which nothing is answered; that it is closed is read before that there is a new one."""
    run = Run(0)
    run.advance(2.0, awake=True)
    run.advance(run.now + 20.0, awake=False)
    run.handle([Disconnected("B")])
    run.handle([report_of("A", 999, 1, Phase.ACTIVE, plan=1, fenced=2, applied=5, broken=1, suspects=("B",))])
    assert not run.lost()


def test_a_coordinator_that_comes_back_gives_members_the_time_to_do_so_too() -> None:
    run = Run(0)
    run.restart()
    run.handle([report_of("A", 999, 1, Phase.ACTIVE, plan=1, fenced=2, applied=5, broken=1, suspects=("B",))])
    assert not run.lost()  # B has not connected again yet
    for _ in range(12):
        run.now += TICK_S
        run.handle([Tick()])
    assert run.lost() == {"B": Fate.DEAD}


def test_a_gap_counts_as_a_stall_at_most_and_a_clock_that_goes_back_as_nothing() -> None:
    clock = WakingClock(100.0, stall_s=0.5, listen_s=1.0)
    assert clock.has_listened
    assert (clock.look(100.5), clock.has_listened) == (0.5, True)
    assert (clock.look(200.5), clock.has_listened) == (1.0, False)
    assert (clock.look(150.0), clock.look(200.6)) == (1.0, 1.0 + (200.6 - 200.5))
    clock.look(201.0)
    assert not clock.has_listened
    clock.look(201.5)
    assert clock.has_listened
