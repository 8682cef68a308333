"""What members and the coordinator say to each other."""

from __future__ import annotations

from enum import Enum

import msgspec

from paceline.control.messages.plan import NOTHING, Phase, Plan
from paceline.placement.placement import Placement
from paceline.wire.card import Card


class Introduction(msgspec.Struct, frozen=True):
    """Who a member is, and what must be alike on all members: `facts` (versions, sizes, fingerprints) and a line for
    each parameter. `capacity` and `tried` say how fast it may be, as in its seat. `ranges` are the bytes of each range
    that it needs servers to hold; none if it needs no servers. `leased` says that workers do leases, not steps
    together. `slot` is its number among the workers of its machine, as in w0."""

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
    slot: int = 0


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


class Working(msgspec.Struct, frozen=True):
    """What a worker says of itself.

    `plan` is the newest generation it has been told of, `formed` the newest whose group it has formed, `generation` the
    one it works in, `broken` the newest that cannot work, as far as it knows, because of `suspects`. `dead` are members
    whose end the kernel told it of. `fenced` is its promise: it applies nothing more of a generation below. `applied`
    is the last operation that it has applied, `checkpoint` the newest that it could found the run from. `left` is the
    generation by whose switch it left the run, 0 while it has not. `burden` is a member without which the run would be
    faster, as seen in generation `burden_in`, and `why_burden` the figures. `joinable` says, where workers do leases,
    that this one is in its loop over them, or has done no operation since: others may join now. `surveyed` is the
    newest survey that it has made, `unreachable` whom it could not reach then."""

    plan: int = 0
    formed: int = 0
    generation: int = 0
    broken: int = 0
    suspects: tuple[str, ...] = ()
    dead: tuple[str, ...] = ()
    fenced: int = 0
    applied: int = NOTHING
    checkpoint: int = NOTHING
    left: int = 0
    burden: str = ""
    why_burden: str = ""
    burden_in: int = 0
    joinable: bool = False
    surveyed: int = 0
    unreachable: tuple[str, ...] = ()


class Report(msgspec.Struct, frozen=True):
    """All that matters of a member; numbered, so that an older one that comes late is known as such. `placement` is the
    newest version of the placement it has been told of. `held` is the placement it goes by, said to a coordinator that
    does not know this member: it may have forgotten where the ranges are. Who is no worker is `working` on nothing,
    and only servers are `serving`."""

    member: str
    number: int
    term: int
    phase: Phase
    leaving: bool = False
    cause: str = ""
    placement: int = 0
    introduction: Introduction | None = None
    held: Placement | None = None
    working: Working = Working()
    serving: Serving | None = None


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
