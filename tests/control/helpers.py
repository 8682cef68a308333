"""What the tests of control's shells share: a service in a thread, and members with a training made of nothing."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import (
    Action,
    ApplyOperation,
    Begin,
    Caught,
    DoOperation,
    Exit,
    FormGroup,
    Give,
    GroupBroke,
    GroupFormed,
    MemberReady,
    OperationDone,
    OperationKind,
    StateStaged,
    Take,
)
from paceline.control.messages.members import Introduction
from paceline.control.messages.plan import Plan
from paceline.control.messages.progress import StepRow
from paceline.control.shell.client import MemberClient
from paceline.control.shell.config import Config
from paceline.control.shell.service import CoordinatorService
from paceline.control.shell.ticket import Ticket
from paceline.wire.card import Card, this_host
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

WAIT_S = 30.0


def new_config(folder: Path, **settings: float) -> Config:
    return Config.new(run="test", folder=folder, settings=RunSettings(**settings))  # type: ignore[arg-type]


class Running:
    """A service that runs in a thread of this process."""

    def __init__(self, config: Config) -> None:
        self.service = CoordinatorService(config)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.code = self.service.run()

    @property
    def ticket(self) -> Ticket:
        return self.service.ticket

    def join(self) -> int:
        self._thread.join(WAIT_S)
        assert self.code is not None, "the service does not end"
        return self.code

    def stop(self) -> None:
        self.service.stop()
        self._thread.join(WAIT_S)


@contextlib.contextmanager
def serving(config: Config) -> Iterator[Running]:
    running = Running(config)
    try:
        yield running
    finally:
        running.stop()


def card_of(identity: Identity) -> Card:
    return Card(identity.member, "worker", this_host(), ("127.0.0.1", 1), "", identity.fingerprint, False, (0,))


def introduction_of(identity: Identity, **facts: str) -> Introduction:
    return Introduction(card_of(identity), os.getpid(), "here", "agent", facts)


class Net:
    """Stands for the groups: an operation is complete when all seats of its plan have come to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrived: dict[tuple[int, int], tuple[Plan, dict[str, tuple[int, bool]]]] = {}
        self._gifts: dict[tuple[int, str], int] = {}
        self._takers: dict[tuple[int, str], Trainee] = {}
        self._dead: set[str] = set()
        self.trainees: dict[str, Trainee] = {}

    def work(self, trainee: Trainee, action: DoOperation) -> None:
        plan = action.plan
        held, stopping = trainee.client.look(lambda machine: (machine.offer(), machine.stop_asked))
        with self._lock:
            lost = self._dead.intersection(plan.members)
            _, arrived = self._arrived.setdefault((plan.generation, action.operation), (plan, {}))
            arrived[trainee.name] = (held, stopping)
            complete = len(arrived) == len(plan.seats)
        if lost:
            trainee.client.post(GroupBroke(plan.generation, tuple(lost)))
        elif complete:
            held_by_rank = tuple(arrived[member][0] for member in plan.members)
            stops = any(stop for _, stop in arrived.values())
            for member in plan.members:
                self.trainees[member].client.post(OperationDone(plan.generation, action.operation, held_by_rank, stops))

    def kill(self, name: str) -> None:
        with self._lock:
            self._dead.add(name)
            hit = [(plan, list(arrived)) for plan, arrived in self._arrived.values() if name in plan.members]
        for plan, arrived in hit:
            for member in arrived:
                if member != name:
                    self.trainees[member].client.post(GroupBroke(plan.generation, (name,)))

    def give(self, action: Give, base: int) -> None:
        self._hand((action.plan.generation, action.to), base=base)

    def take(self, trainee: Trainee, action: Take) -> None:
        self._hand((action.plan.generation, trainee.name), taker=trainee, whole=action.whole)

    def _hand(
        self, key: tuple[int, str], *, base: int | None = None, taker: Trainee | None = None, whole: bool = True
    ) -> None:
        with self._lock:
            if base is not None:
                self._gifts[key] = base
            if taker is not None:
                taker.takes_whole = whole
                self._takers[key] = taker
            if key not in self._gifts or key not in self._takers:
                return
            base, taker = self._gifts[key], self._takers[key]
        event = StateStaged(key[0], base) if taker.takes_whole else Caught(key[0], base)
        taker.client.post(event)


class Trainee:
    """A member whose training does `num_steps` operations of nothing, one every `pace_s`, and then the end."""

    def __init__(
        self, ticket: Ticket, net: Net, *, num_steps: int = 10, pace_s: float = 0.0, secret: bytes | None = None
    ) -> None:
        identity = Identity()
        self.name = identity.member
        self.num_steps, self._pace_s = num_steps, pace_s
        self.takes_whole = True
        self.applied: list[int] = []
        self.plans: list[Plan] = []
        self.exit: Exit | None = None
        self.exited = threading.Event()
        self._net = net
        self._actions: queue.Queue[Action | None] = queue.Queue()
        net.trainees[self.name] = self
        self.credentials = Credentials(identity, secret or ticket.secret, "worker")
        self.client = MemberClient(ticket, Member(self.name), self.credentials, self._actions.put, heartbeat_s=0.1)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self.client.post(MemberReady(introduction_of(identity, model="m")))
        self.client.post(Begin(OperationKind.STEP))

    def _train(self) -> None:
        while (action := self._actions.get(timeout=WAIT_S)) is not None:
            if isinstance(action, FormGroup):
                self.plans.append(action.plan)
                self.client.post(GroupFormed(action.plan.generation))
            elif isinstance(action, Give):
                self._net.give(action, self.client.look(lambda machine: machine.applied))
            elif isinstance(action, Take):
                self._net.take(self, action)
            elif isinstance(action, DoOperation):
                time.sleep(self._pace_s)
                self._net.work(self, action)
            elif isinstance(action, ApplyOperation):
                self._apply(action)
            elif isinstance(action, Exit):
                self.exit = action
                self.exited.set()

    def _apply(self, action: ApplyOperation) -> None:
        self.applied.append(action.operation)
        row = StepRow(action.operation, action.plan.generation, 0, action.operation * 4, 4, 0.5, 0.01)
        self.client.progress.add(row)
        over, stopping = self.client.look(lambda machine: (machine.phase.value == "ended", machine.stopping))
        if not over:
            ends = action.operation >= self.num_steps or stopping
            self.client.post(Begin(OperationKind.END if ends else OperationKind.STEP))

    def close(self, flush_s: float = 5.0) -> None:
        self.client.close(flush_s)
        self._actions.put(None)
        self._thread.join(WAIT_S)

    def vanish(self) -> None:
        """As kill -9 looks to the others: no last word."""
        self._actions.put(None)
        self._thread.join(WAIT_S)
        self.client.close(flush_s=0.0)
        self._net.kill(self.name)


class Team:
    """Members in one net; `join` adds one."""

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.net = Net()
        self.trainees: list[Trainee] = []

    def join(self, *, num_steps: int = 10**6, pace_s: float = 0.002) -> Trainee:
        self.trainees.append(Trainee(self.ticket, self.net, num_steps=num_steps, pace_s=pace_s))
        return self.trainees[-1]


@contextlib.contextmanager
def team(ticket: Ticket) -> Iterator[Team]:
    members = Team(ticket)
    try:
        yield members
    finally:
        for trainee in members.trainees:
            trainee.close(flush_s=1.0 if trainee.exit else 0.0)


@contextlib.contextmanager
def training(ticket: Ticket, size: int, *, num_steps: int = 10**6, pace_s: float = 0.002) -> Iterator[list[Trainee]]:
    with team(ticket) as members:
        yield [members.join(num_steps=num_steps, pace_s=pace_s) for _ in range(size)]
