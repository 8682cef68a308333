"""The contract of an engine: where the workers and servers of one agent live, and how it is known that they died.

The agent's loop is the only caller, on one thread. It waits on `Process.fileno` of all processes at once, so an end is
known without polling. What is to be done about it is for the `Supervisor` to say; an engine decides nothing.

An engine promises
- `start` returns when the process exists; it raises `EngineError`, naming the remedy, when there can be none.
- After `Process.close`, nothing that the process has started lives on, and all that it has printed is in its log.
- After `Engine.close`, nothing of the engine is left; if the agent itself is killed, its processes die with it.
"""

from __future__ import annotations

from typing import Protocol

from paceline.control.messages.agents import ProcessVitals
from paceline.errors import PacelineError


class EngineError(PacelineError):
    """A process cannot be started."""


class Process(Protocol):
    """One worker or server, from its start to the end of all that it has started."""

    @property
    def label(self) -> str:
        """What people call its slot: w0, s1."""

    @property
    def pid(self) -> int: ...

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""

    def exit_code(self) -> int | None:
        """None while it lives; the number of a signal, negative, if one ended it."""

    def vitals(self) -> ProcessVitals:
        """What can be seen of a living process; `busy` says whether it has computed since the last look."""

    def has_session(self) -> bool:
        """Whether it has taken its ticket: a script that does is part of the run, one that does not is a plain one."""

    def signal(self, number: int) -> None:
        """Send a signal to it and what it has started; one that is gone does not mind."""

    def last_lines(self) -> list[str]:
        """The end of what it has written, errors first of all."""

    def close(self) -> None:
        """End what is left of it."""


class Engine(Protocol):
    def start(self, slot: int) -> Process:
        """Start a worker or a server in one of the agent's slots, which are numbered as `slots.py` says."""

    def close(self) -> None: ...
