"""The rules of an agent, and what it knows of each of its slots.

Slots are numbered in one row, workers first: with two workers and two servers, 0 and 1 are w0 and w1, 2 and 3 are s0
and s1. Numbers are for the machine, labels for people.
"""

from __future__ import annotations

from enum import Enum

import msgspec


class AgentRules(msgspec.Struct, frozen=True, kw_only=True):
    """How many processes an agent starts, and how patient it is. `owns_coordinator` is false for one that joined a run
    of another host; only such a one may do without workers."""

    workers: int
    servers: int = 0
    restarts: int = 3
    strict: bool = False  # a run that ends without a worker which it was asked to have has an exit code of its own
    owns_coordinator: bool = True
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    settled_s: float = 60.0
    doubt_s: float = 5.0
    grace_s: float = 5.0
    together_s: float = 0.3  # signals that come in this time are one: `timeout` sends each twice, systemd several
    farewell_s: float = 15.0  # for a coordinator or a server to end after the run, or a worker after a failed one
    halt_s: float = 120.0  # for workers to leave what they hold here, when there is no coordinator any more
    coordinator_deaths: int = 10  # within `coordinator_window_s`
    coordinator_window_s: float = 60.0
    full_s: float = 600.0  # how long a coordinator may lack room on its disk

    def __post_init__(self) -> None:
        if self.workers < 1 and self.owns_coordinator:
            raise ValueError(f"-n {self.workers}: a run needs at least one worker")
        if self.workers < 0:
            raise ValueError(f"-n {self.workers}: give 0 to start no worker here, or more")
        if self.servers < 0:
            raise ValueError(f"--servers {self.servers}: give 0 to start no server here, or more")
        if self.workers + self.servers < 1:
            raise ValueError("-n 0 and no servers: nothing would be started; give -n or --servers, or both")
        if self.restarts < 0:
            raise ValueError(f"--restarts {self.restarts}: give 0 to start no process again, or more")


def label_of(slot: int, workers: int) -> str:
    """What people call a slot of an agent with so many workers."""
    return f"w{slot}" if slot < workers else f"s{slot - workers}"


class SlotState(Enum):
    WAITING = "waiting"  # to be started again
    RUNNING = "running"
    DOUBTED = "doubted"  # ended by a signal before it was known whether the script has a session
    FINAL = "final"  # will not be started any more


class Slot:
    def __init__(self, number: int, label: str, *, is_server: bool = False) -> None:
        self.number = number
        self.label = label
        self.is_server = is_server
        self.state = SlotState.WAITING
        self.until = 0.0  # of the waiting or the doubt
        self.pid = 0
        self.code: int | None = None
        self.since = 0.0
        self.num_starts = 0
        self.num_restarts = 0  # since a process has lived long enough
        self.first_failed = False  # its first process ended soon, by an error of its own
        self.has_session = False
        self.was_ended = False  # by this agent
        self.outlived_run = False
        self.lost = ""  # why there will be no other process here, although the run goes on
        self.kill_at: float | None = None  # when it was asked to end and has not; never again once it was killed
