"""What coordinator, members and agents say to each other; and the plan, which is what all of it is about."""

from __future__ import annotations

import functools
from enum import Enum

import msgspec

from paceline.placement.placement import Placement
from paceline.wire.card import Card

NOTHING = -1  # the number of the last operation of a member that holds no training state


class Phase(Enum):
    """Where a member stands, as it sees itself."""

    BUILDING = "building"  # the script runs, its session is not there yet
    READY = "ready"  # has built model and data; waits for a seat, or for the state
    ACTIVE = "active"
    LEAVING = "leaving"  # switched out of the run; waits to be released
    ENDED = "ended"  # applied the end; waits to be released
    FAILED = "failed"  # its script raised


class Start(Enum):
    """How the members of a plan come to stand at the same operation."""

    FOUND = "found"  # the first seat has the state (new, or from a checkpoint) and gives it to all others
    RECOVER = "recover"  # all seats have the state; who is one operation behind gets that operation's result
    SWITCH = "switch"  # agreed in the header; newcomers get the state from a donor at the clean point


class Seat(msgspec.Struct, frozen=True):
    """`share` is a fixed part of every batch, beside those of the others; 0 in all seats of a plan leaves the shares to
    the workers, who give each what it can carry. Before a worker is measured, `capacity` is how fast it was declared to
    be, beside the others, and `tried` the fixed time of a step and that of a sample, in seconds, in its own trial."""

    card: Card
    share: int = 0
    capacity: float = 0.0
    tried: tuple[float, float] | None = None

    @property
    def member(self) -> str:
        return self.card.member

    @property
    def host(self) -> str:
        return self.card.host


class Plan(msgspec.Struct, frozen=True, dict=True):
    """Who takes part, in order of rank. Immutable; a generation is used for one plan only.

    `base` is the operation after which all stand when it starts (in a switch it is agreed in band). `gifts` says from
    whom a member gets what it lacks; `newcomers` lack everything."""

    generation: int
    start: Start
    seats: tuple[Seat, ...]
    base: int = NOTHING
    gifts: dict[str, str] = {}
    newcomers: tuple[str, ...] = ()

    def rank_of(self, member: str) -> int:
        """The rank of a member, or -1."""
        return self._ranks.get(member, -1)

    @functools.cached_property
    def is_balanced(self) -> bool:
        """Whether the workers find their shares themselves."""
        return not any(seat.share for seat in self.seats)

    @functools.cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(seat.card.member for seat in self.seats)

    @functools.cached_property
    def _ranks(self) -> dict[str, int]:
        return {member: rank for rank, member in enumerate(self.members)}


class Introduction(msgspec.Struct, frozen=True):
    """Who a member is, and what must be alike on all members: `facts` (versions, sizes, fingerprints) and a line for
    each parameter. `capacity` and `tried` say how fast it may be, as in its seat. `ranges` are the bytes of each range
    that it needs servers to hold; none if it needs no servers. `leased` says that workers do leases, not steps
    together."""

    card: Card
    pid: int
    host: str
    agent: str
    facts: dict[str, str] = {}
    parameters: tuple[str, ...] = ()
    capacity: float = 0.0
    tried: tuple[float, float] | None = None
    ranges: tuple[int, ...] = ()
    leased: bool = False


class Serving(msgspec.Struct, frozen=True):
    """What a server says of itself: the version of the placement it goes by, which ranges it has all of and which it
    has handed over; in the `window` of this number, which seconds of a second each of its ranges cost it; and for
    people, how many keys it has, how much memory, which part of that window it was busy, and how stale pushes of leases
    were: how many of them had 0, 1, 2 to 3, 4 to 7, ... other updates between their pull and themselves."""

    version: int = 0
    synced: tuple[int, ...] = ()
    handed: tuple[int, ...] = ()
    num_keys: int = 0
    num_bytes: int = 0
    busy: float = 0.0
    staleness: tuple[int, ...] = ()
    window: int = 0
    costs: dict[int, float] = {}


class Survey(msgspec.Struct, frozen=True):
    """Dial these members, each at its address, and say whom you cannot reach. Numbered."""

    number: int
    targets: dict[str, tuple[str, int]]


class Report(msgspec.Struct, frozen=True):
    """All that matters of a member; numbered, so that an older one that comes late is known as such.

    `plan` is the newest generation it has been told of, `formed` the newest whose group it has formed, `generation` the
    one it works in, `broken` the newest that cannot work, as far as it knows, because of `suspects`. `fenced` is its
    promise: it applies nothing more of a generation below. `dead` are members whose end the kernel told it of.
    `checkpoint` is the newest operation that it could found the run from. `left` is the generation
    by whose switch it left the run, 0 while it has not. `burden` is a member without which the run would be faster, as
    seen in generation `burden_in`, and `why_burden` the figures. `placement` is the newest version of the placement it
    has been told of, `serving` what only servers say. `joinable` says, where workers do leases, that this one is in
    its loop over them, or has done no operation since: others may join now. `surveyed` is the newest survey that it
    has made, `unreachable` whom it could not reach then. `held` is the placement it goes by, said to a coordinator that
    does not know this member: it may have forgotten where the ranges are."""

    member: str
    number: int
    term: int
    phase: Phase
    plan: int = 0
    formed: int = 0
    generation: int = 0
    broken: int = 0
    suspects: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    fenced: int = 0
    applied: int = NOTHING
    checkpoint: int = NOTHING
    leaving: bool = False
    left: int = 0
    burden: str = ""
    why_burden: str = ""
    burden_in: int = 0
    cause: str = ""
    placement: int = 0
    serving: Serving | None = None
    joinable: bool = False
    surveyed: int = 0
    unreachable: tuple[str, ...] = ()
    introduction: Introduction | None = None
    held: Placement | None = None


class Verdict(Enum):
    UNKNOWN = "unknown"  # introduce yourself
    KNOWN = "known"
    REFUSED = "refused"  # does not fit this run
    EVICTED = "evicted"
    RELEASED = "released"  # may exit
    FAILED = "failed"  # the run failed


class Directive(msgspec.Struct, frozen=True):
    """All that matters for one member. Ordered by (term, number). The plan, and the placement of the parameters on
    servers, is left out where the member has it, and a survey where it has made it."""

    term: int
    number: int
    member: str
    verdict: Verdict
    reason: str = ""
    fence: int = 0
    plan: Plan | None = None
    leave: bool = False
    stop: bool = False
    placement: Placement | None = None
    survey: Survey | None = None


class Vitals(msgspec.Struct, frozen=True):
    """What an agent sees of a process: its state (R, S, D, T, Z), and whether it has computed since the last look."""

    state: str
    busy: bool


class AgentReport(msgspec.Struct, frozen=True):
    """All that an agent knows of its children, by process id: those that live, and how the others ended; `servers` are
    those of the living that are no workers. An agent that is `exhausted` will start no more workers."""

    agent: str
    number: int
    living: dict[int, Vitals] = {}
    exits: dict[int, str] = {}
    exhausted: bool = False
    servers: tuple[int, ...] = ()
    servers_exhausted: bool = False

    @property
    def num_workers(self) -> int:
        """That live."""
        return len(self.living.keys() - set(self.servers))


class AgentDirective(msgspec.Struct, frozen=True):
    """What an agent is to do: kill these processes, start no others in place of those that were `refused` (with what
    differs), start no more when the run is over; whether it failed, and why it is over."""

    term: int
    number: int
    agent: str
    kill: tuple[int, ...] = ()
    over: bool = False
    verdict: str = ""
    failed: bool = False
    refused: dict[int, str] = {}
