"""The rules of an agent, and what it knows of each of its slots."""

from __future__ import annotations

from enum import Enum

import msgspec


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How patient an agent is. `owns_coordinator` is false for one that joined another host's run."""

    workers: int
    restarts: int = 3
    owns_coordinator: bool = True
    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    settled_s: float = 60.0
    doubt_s: float = 5.0
    grace_s: float = 5.0
    farewell_s: float = 15.0  # for a coordinator to end after the run, or a worker after a failed one
    coordinator_deaths: int = 10  # within `coordinator_window_s`
    coordinator_window_s: float = 60.0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ValueError(f"-n {self.workers}: a run needs at least one worker")
        if self.restarts < 0:
            raise ValueError(f"--restarts {self.restarts}: give 0 to start no worker again, or more")


class State(Enum):
    WAITING = "waiting"  # to be started again
    RUNNING = "running"
    DOUBTED = "doubted"  # ended by a signal before it was known whether the script has a session
    FINAL = "final"  # will not be started any more


class Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.state = State.WAITING
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
        self.kill_at: float | None = None  # when it was asked to end and has not
