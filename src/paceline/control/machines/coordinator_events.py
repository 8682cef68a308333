"""What the coordinator's machine is told, what it wants done, and what it must not forget."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from paceline.control.leases.messages import LeaseGrant, LeaseReport
from paceline.control.messages.agents import AgentDirective, AgentReport
from paceline.control.messages.members import Directive, Report
from paceline.control.messages.plan import NOTHING, Plan
from paceline.control.messages.progress import StepRow


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`wanted` members start the run, or at least `fewest` after `grace_s`; no more than `most` are seated. `shares`
    are fixed ones, in the order of the first ranks: as many as there may be members, or one that all have; none lets
    each worker take what it can carry. `servers` start the run beside the workers, and hold each parameter `replicas`
    times, on as many of them; those that have much more to do than others give ranges away if `by_load`."""

    wanted: int = 1
    fewest: int = 1
    most: int = 1 << 30
    shares: tuple[int, ...] = ()
    drop_stragglers: bool = False
    servers: int = 0
    replicas: int = 1
    by_load: bool = True
    grace_s: float = 20.0
    silence_s: float = 5.0
    stuck_s: float = 60.0  # the same for a process that is seen to be busy
    all_silent_s: float = 900.0  # the same when nobody is heard; longer than a member works without the coordinator
    stall_s: float = 0.5  # a longer gap between two looks at the clock counts as this: the coordinator stood still
    listen_s: float = 1.0  # for so long it then hears what was said meanwhile, before it misses anybody

    def __post_init__(self) -> None:
        if self.shares and self.drop_stragglers:
            raise ValueError("--drop-stragglers goes by measured speeds, and --shares fixes them; leave out either")
        if any(share < 1 for share in self.shares):
            raise ValueError(f"--shares {':'.join(map(str, self.shares))}: each share must be 1 or more")
        if len(self.shares) > 1 and len(self.shares) != self.most:
            listed, most = ":".join(map(str, self.shares)), max(self.wanted, self.most)
            raise ValueError(
                f"--shares {listed} is for {len(self.shares)} workers, but there are {self.wanted} (-n) and no more "
                f"than {most} may take part (--max); give one share for each of them, --max {len(self.shares)} if "
                "others will join and take the last ones, or equal shares for any number (--shares equal)"
            )
        if not 1 <= self.fewest <= self.wanted <= self.most:
            raise ValueError(
                f"--min {self.fewest}, -n {self.wanted} and --max {self.most} must be at least 1 and in this order"
            )
        if self.servers < 0:
            raise ValueError(f"--servers {self.servers}: give 0 for a run without servers, or more")
        if self.replicas < 1:
            raise ValueError(f"--replicas {self.replicas}: give 1 to have each parameter on one server, or more")
        if self.replicas > 1 and not self.servers:
            raise ValueError(
                f"--replicas {self.replicas} is for parameters on servers, and there are none; give --servers "
                f"{self.replicas} or more, or leave out --replicas"
            )
        if self.replicas > max(self.servers, 1):
            raise ValueError(
                f"--replicas {self.replicas} with --servers {self.servers}: each replica needs its own server; give "
                f"--servers {self.replicas} or more, or --replicas {self.servers} or fewer"
            )


class Connected(NamedTuple):
    member: str


class Disconnected(NamedTuple):
    member: str


class Drain(NamedTuple):
    """A person asks a member to leave."""

    member: str


class Halt(NamedTuple):
    """A person asks the whole run to end after the step under way."""

    reason: str


class Tick(NamedTuple):
    pass


Event = Report | LeaseReport | AgentReport | Connected | Disconnected | Drain | Halt | Tick


class Tell(NamedTuple):
    directive: Directive


class TellAgent(NamedTuple):
    directive: AgentDirective


class TellLeases(NamedTuple):
    grant: LeaseGrant


class Count(NamedTuple):
    """Leases are done: for the run's database."""

    rows: tuple[StepRow, ...]


class AdoptLeases(NamedTuple):
    """An epoch goes on from a checkpoint that had these leases: their rows in the run's database, if they are there,
    belong to what was founded with it. Others' do not, and are done again."""

    rows: tuple[StepRow, ...]


class Remember(NamedTuple):
    """Keep this on disk; None forgets it."""

    key: str
    value: bytes | None


class Note(NamedTuple):
    """Something that a person may want to know."""

    kind: str
    member: str
    text: str


class RunOver(NamedTuple):
    """The run is over and everybody is gone or released."""

    failed: bool
    reason: str


Action = Tell | TellAgent | TellLeases | Count | AdoptLeases | Remember | Note | RunOver


class CoordinatorState(msgspec.Struct, frozen=True):
    """What the coordinator must not forget, beside the records of members."""

    term: int = 0
    fence: int = 0
    newest: int = 0  # the highest generation ever used
    current: Plan | None = None
    pending: Plan | None = None
    facts: dict[str, str] | None = None
    parameters: tuple[str, ...] = ()
    ranges: tuple[int, ...] = ()  # the bytes of each that is kept on servers
    leased: bool = False  # workers do leases, not steps together
    witness: str = ""  # the member that the facts are of
    founded: int = 0  # how often the run was founded
    reached: int = NOTHING  # the highest operation known to be applied
    over: str = ""  # "", "ended", "failed"
    reason: str = ""
    halting: str = ""
    whole: int = -1  # the epoch of which all leases were done when the run was asked to end
