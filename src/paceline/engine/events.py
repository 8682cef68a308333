"""What happens to an agent, and what it does about it: the words of the `Supervisor` machine."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from paceline.control.messages.agents import AgentDirective


class ProcessStarted(NamedTuple):
    slot: int
    pid: int


class NotStarted(NamedTuple):
    slot: int
    reason: str


class Opened(NamedTuple):
    """The process has taken its ticket: if it is a worker, its script has a session."""

    slot: int


class Exited(NamedTuple):
    """`code` is negative for a signal."""

    slot: int
    code: int


class CoordinatorEnded(NamedTuple):
    """`verdict` is what it has written down of the run: "ended", "failed", or empty if the run is not over; `released`
    are the processes of this agent that it let go in peace, `known` all of this agent that it has ever known."""

    code: int
    verdict: str
    released: frozenset[int] = frozenset()
    known: frozenset[int] = frozenset()


class CoordinatorLost(NamedTuple):
    """The coordinator of another host was not heard of for too long."""


class StopAsked(NamedTuple):
    """A person or the system asks for the end, by this signal."""

    number: int


class Suspended(NamedTuple):
    """Ctrl-Z."""


class Resumed(NamedTuple):
    pass


class AgentTick(NamedTuple):
    pass


Event = (
    ProcessStarted
    | NotStarted
    | Opened
    | Exited
    | CoordinatorEnded
    | CoordinatorLost
    | StopAsked
    | Suspended
    | Resumed
    | AgentTick
    | AgentDirective
)


class StartProcess(NamedTuple):
    slot: int


class Signal(NamedTuple):
    """Send a signal to a worker or a server and what it has started."""

    slot: int
    number: int


class StartCoordinator(NamedTuple):
    pass


class SignalCoordinator(NamedTuple):
    number: int


class AskHalt(NamedTuple):
    """Ask the coordinator to end the run after the step under way."""

    reason: str


class StopSelf(NamedTuple):
    """Stand still, as Ctrl-Z asks; `Resumed` follows."""


class PrintLine(NamedTuple):
    """A line for the person at the terminal."""

    text: str


Action = StartProcess | Signal | StartCoordinator | SignalCoordinator | AskHalt | StopSelf | PrintLine


class RunResult(Enum):
    ENDED = "ended"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    FAILED_LATER = "failed later"  # the run had come to its end; what a script did after it failed
    HALTED = "halted"  # the coordinator is gone for good, and workers have left what they held on this host


class RunOutcome(NamedTuple):
    """How it ended. `code` is for the process's own exit; `slot` is the process at fault, -1 for none; `reason` what is
    known beside that process's own words; `missing` are workers of this agent that the run ended without, because they
    failed, each with how."""

    result: RunResult
    code: int
    slot: int = -1
    reason: str = ""
    missing: tuple[str, ...] = ()
