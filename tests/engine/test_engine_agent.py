"""What happens to an agent at one moment, in which order it is looked at."""

from __future__ import annotations

import os
import signal
import time
from typing import cast

import pytest

from paceline.control.messages.agents import ProcessVitals
from paceline.control.shell.ticket import Ticket
from paceline.engine.agent import Agent
from paceline.engine.base import Engine, Process
from paceline.engine.events import RunResult
from paceline.engine.signals import Signals
from paceline.engine.slots import AgentRules
from paceline.engine.supervisor import Supervisor
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity


class Struck:
    """A process that a signal to all has ended; the agent gets it at the same time."""

    label, pid = "w0", 1

    def __init__(self, number: int) -> None:
        self._number = number

    def exit_code(self) -> int:
        os.kill(os.getpid(), self._number)
        return -self._number

    def vitals(self) -> ProcessVitals:
        return ProcessVitals("R", True)

    def has_session(self) -> bool:
        return False

    def signal(self, number: int) -> None:
        pass

    def close(self) -> None:
        pass


class AllStruck:
    def __init__(self, number: int) -> None:
        self._number = number

    def start(self, _: int) -> Process:
        return cast(Process, Struck(self._number))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_ended_by_a_signal_to_all_did_not_fail(number: signal.Signals) -> None:
    machine = Supervisor(AgentRules(workers=2, owns_coordinator=False))
    agent = Agent(
        machine,
        cast(Engine, AllStruck(number)),
        cast(Ticket, None),
        Credentials(Identity(), b"s" * 32, "agent"),
        coordinator=None,
        say=lambda _: None,
        on_start=lambda _: None,
        on_session=lambda: None,
    )
    before = signal.signal(number, signal.SIG_DFL)  # in the background of a shell it may be ignored
    try:
        with Signals() as signals:
            agent._act(machine.begin(time.monotonic()))
            agent._collect(signals)
    finally:
        signal.signal(number, before)
        agent._leave()
    assert machine.outcome is not None
    assert machine.outcome.result is RunResult.INTERRUPTED
    assert machine.outcome.code == 128 + number
