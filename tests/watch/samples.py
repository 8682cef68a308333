"""Runs for the tests of what a person sees, written through the journal as a coordinator writes them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from paceline.control.journal.journal import Happening, Journal, MemberRow
from paceline.control.journal.reader import EventRow, PlanRow, StepRecord
from paceline.control.messages.plan import Plan, PlanStart, Seat
from paceline.control.messages.progress import MetricRow, StepRow
from paceline.wire.card import Card

LENGTH, BATCH = 100, 32
EPOCH = ((0, 32), (32, 32), (64, 32), (96, 4))  # the steps of one epoch: position, count
START = 1_700_000_000.0
FACTS = {"fact/dataset_length": str(LENGTH), "fact/global_batch": str(BATCH), "fact/num_epochs": "3"}


class Writer:
    """A run whose clock is `now`; `running` and the others write what a coordinator would."""

    def __init__(self, folder: Path, has_clock: bool) -> None:
        self.now = START
        self.operation = 0
        self.generation = 0
        self.journal = Journal(folder, clock=(lambda: self.now) if has_clock else time.time)

    def say(self, status: str, reason: str = "", **more: str) -> None:
        run = {"name": "digits", "status": status, "reason": reason, "started": str(START), **FACTS, **more}
        self.journal.record(run=run)

    def plan(self, *members: str, start: PlanStart = PlanStart.SWITCH, base: int = -1) -> None:
        self.generation += 1
        plan = Plan(self.generation, start, tuple(Seat(_card(name), 16) for name in members), base)
        text = f"generation {self.generation} ({start.value}): {', '.join(members)}"
        self.journal.commit({}, [Happening(1, "plan", "", text)], [plan])
        if start is PlanStart.FOUND:
            self.operation = max(0, base)

    def event(self, kind: str, member: str = "", text: str = "") -> None:
        self.journal.commit({}, [Happening(1, kind, member, text)])

    def member(self, name: str, rank: int = -1, phase: str = "active", fate: str = "", reason: str = "") -> None:
        self.journal.record(members=[self._state(name, rank, phase, fate, reason)])

    def newcomer(self, name: str, text: str) -> None:
        """It is among the members as soon as one can read that it joined."""
        self.journal.commit({}, [Happening(1, "joined", name, text)], members=[self._state(name, -1, "ready", "", "")])

    def _state(self, name: str, rank: int, phase: str, fate: str, reason: str) -> MemberRow:
        return MemberRow(
            name, "agent", 4711, "lab-1", rank, 16, phase, fate, reason, self.generation, self.operation, 120.0, 0.25
        )

    def server(self, name: str, **fields: Any) -> None:
        """One that serves 8 ranges, unless the fields of its state say otherwise."""
        state = MemberRow(
            *(name, "agent", 4712, "lab-1", -1, 0, "serving", "", "", 0, -1),
            role="server",
            ranges=8,
            num_keys=600_000,
            num_bytes=170_000_000,
            busy=0.35,
        )
        self.journal.record(members=[msgspec.structs.replace(state, **fields)])

    def steps(self, epoch: int, batches: tuple[tuple[int, int], ...] = EPOCH, loss: float = 0.5) -> None:
        """A step a second."""
        for position, count in batches:
            self.now += 1.0
            self.operation += 1
            row = StepRow(self.operation, self.generation, epoch, position, count, loss / self.operation, 1.0)
            self.journal.record([row])

    def metric(self, name: str, value: float) -> None:
        self.journal.record(metrics=[MetricRow(self.operation, name, value)])


@contextlib.contextmanager
def writing(folder: Path, *, has_clock: bool = False) -> Iterator[Writer]:
    """If it `has_clock`, the journal goes by the writer's, else by that of this machine."""
    writer = Writer(folder, has_clock)
    try:
        yield writer
    finally:
        writer.journal.close()


def a_whole_run(writer: Writer) -> None:
    """Two members, one epoch; one of them dies in the second, another one comes; two epochs in all."""
    writer.say("gathering")
    writer.newcomer("aaaaaaaaaaaaaaaa", "process 1 on lab-1")
    writer.newcomer("bbbbbbbbbbbbbbbb", "process 2 on lab-2")
    writer.plan("aaaaaaaaaaaaaaaa", "bbbbbbbbbbbbbbbb", start=PlanStart.FOUND, base=0)
    writer.say("running")
    writer.member("aaaaaaaaaaaaaaaa", 0)
    writer.member("bbbbbbbbbbbbbbbb", 1)
    writer.steps(0)
    writer.metric("accuracy", 0.75)
    writer.steps(1, EPOCH[:2])
    writer.now += 1.0
    writer.event("dead", "bbbbbbbbbbbbbbbb", "process 2 was killed by signal 9")
    writer.member("bbbbbbbbbbbbbbbb", -1, fate="dead", reason="process 2 was killed by signal 9")
    writer.now += 1.0
    writer.plan("aaaaaaaaaaaaaaaa", start=PlanStart.RECOVER, base=6)
    writer.steps(1, EPOCH[2:])
    writer.metric("accuracy", 0.875)


def step(operation: int, position: int, count: int, *, epoch: int = 0, founding: int = 1, times: int = 1) -> StepRecord:
    return StepRecord(operation, START + operation, founding, epoch, position, count, 0.5, 1.0, founding, times)


def plan_row(generation: int, start: PlanStart, at: float, base: int = -1) -> PlanRow:
    return PlanRow(generation, START + at, start.value, base, ("a",), (1,))


def event_row(kind: str, at: float, text: str = "") -> EventRow:
    return EventRow(int(at * 100), START + at, 1, kind, "aaaaaaaaaaaaaaaa", text)


def _card(name: str) -> Card:
    return Card(name, "worker", "here", ("127.0.0.1", 1), "", b"", False, (0,))
