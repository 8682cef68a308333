"""A worker script's part in a run, with a training made of nothing: operations count when all members have come.

    members.train(num_steps, pace_s=0.01)      in a script that `paceline run` starts

Members meet in files of the run's folder instead of in a group, so that nothing but control is tested here.
"""

from __future__ import annotations

import os
import queue
import socket
import time
from pathlib import Path

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
from paceline.control.messages.progress import StepRow
from paceline.control.shell.client import MemberClient
from paceline.control.shell.ticket import Ticket, inherited
from paceline.wire.card import Card, this_host
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

WAIT_S = 60.0


class Trainee:
    def __init__(self, ticket: Ticket, meeting: Path, num_steps: int, pace_s: float) -> None:
        self._meeting = meeting
        self._num_steps, self._pace_s = num_steps, pace_s
        identity = Identity()
        self.name = identity.member
        self._actions: queue.Queue[Action] = queue.Queue()
        credentials = Credentials(identity, ticket.secret, "worker")
        self._has_verdict = False
        self.client = MemberClient(ticket, Member(self.name), credentials, self._act, heartbeat_s=0.2)
        card = Card(self.name, "worker", this_host(), ("127.0.0.1", 1), "", identity.fingerprint, False, (0,))
        self.client.post(MemberReady(Introduction(card, os.getpid(), socket.gethostname(), ticket.agent)))
        self.client.post(Begin(OperationKind.STEP))

    def _act(self, action: Action) -> None:
        self._has_verdict = self._has_verdict or isinstance(action, Exit)
        self._actions.put(action)

    def run(self) -> Exit:
        while True:
            action = self._actions.get(timeout=WAIT_S)
            if isinstance(action, FormGroup):
                self.client.post(GroupFormed(action.plan.generation))
            elif isinstance(action, Give):
                self._leave(f"{action.plan.generation}-gift-{action.to}", str(self._applied()))
            elif isinstance(action, Take):
                self._take(action)
            elif isinstance(action, DoOperation):
                self._work(action)
            elif isinstance(action, ApplyOperation):
                self._apply(action)
            elif isinstance(action, Exit):
                return action

    def _applied(self) -> int:
        return self.client.look(lambda machine: machine.applied)

    def _leave(self, name: str, text: str) -> None:
        draft = self._meeting / f".{name}.{os.getpid()}"
        draft.write_text(text)
        draft.replace(self._meeting / name)

    def _is_void(self, generation: int) -> bool:
        return self._has_verdict or self.client.look(lambda machine: machine.generation) != generation

    def _take(self, action: Take) -> None:
        path = self._meeting / f"{action.plan.generation}-gift-{self.name}"
        while not path.exists():
            if self._is_void(action.plan.generation):
                return
            time.sleep(0.005)
        base, generation = int(path.read_text()), action.plan.generation
        self.client.post(StateStaged(generation, base) if action.whole else Caught(generation, base))

    def _work(self, action: DoOperation) -> None:
        time.sleep(self._pace_s)
        plan = action.plan
        held, stopping = self.client.look(lambda machine: (machine.offer(), machine.stop_asked))
        stem = f"{plan.generation}-{action.operation}-"
        self._leave(stem + self.name, f"{held} {int(stopping)} {os.getpid()}")
        rows = []
        for member in plan.members:
            path = self._meeting / (stem + member)
            while not path.exists():
                if self._is_void(plan.generation):
                    return
                if not self._lives(member):
                    self.client.post(GroupBroke(plan.generation, (member,)))
                    return
                time.sleep(0.005)
            rows.append(path.read_text().split())
        stops = any(row[1] == "1" for row in rows)
        self.client.post(OperationDone(plan.generation, action.operation, tuple(int(row[0]) for row in rows), stops))

    def _lives(self, member: str) -> bool:
        path = self._meeting / f"pid-{member}"
        return not path.exists() or os.path.exists(f"/proc/{path.read_text()}")

    def _apply(self, action: ApplyOperation) -> None:
        row = StepRow(action.operation, action.plan.generation, 0, action.operation * 4, 4, 0.5, 0.01)
        self.client.progress.add(row)
        is_over, stopping = self.client.look(lambda machine: (machine.phase.value == "ended", machine.stopping))
        if not is_over:
            ends = action.operation >= self._num_steps or stopping
            self.client.post(Begin(OperationKind.END if ends else OperationKind.STEP))


def train(num_steps: int, pace_s: float = 0.01) -> str:
    """Take part until released; the verdict."""
    ticket = inherited()
    assert ticket is not None
    meeting = Path("meeting")
    meeting.mkdir(exist_ok=True)
    trainee = Trainee(ticket, meeting, num_steps, pace_s)
    (meeting / f"pid-{trainee.name}").write_text(str(os.getpid()))
    print("member", trainee.name, flush=True)
    leaving = trainee.run()
    trainee.client.close()
    print("verdict", leaving.verdict.value, flush=True)
    return leaving.verdict.value
