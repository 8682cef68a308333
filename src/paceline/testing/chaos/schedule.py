"""A schedule: which run is started, and which faults hit it when. Pure and serialisable.

Its text is one line that a shell takes in quotes:

    async hosts=2 workers=1 servers=2 replicas=2 loaders=0 evaluates=1 seed=7: 1.5 kill 0; 4 cut 1 8
    (mode, the run's shape)                                                  : (seconds, kind, target, length) ...

Times count from the moment when all workers of the run are at work. A target is a number that the fault itself
interprets (a worker, a host, a pair of hosts), always modulo what there is at that moment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

MUTATION = "PACELINE_CHAOS_MUTATION"  # makes the script of the runs wrong, as `training.py` says


class Mode(StrEnum):
    """How gradients become updates."""

    ALLREDUCE = "allreduce"
    HYBRID = "hybrid"
    SYNC = "server"
    BOUNDED = "bounded"
    ASYNC = "async"

    @property
    def has_servers(self) -> bool:
        return self is not Mode.ALLREDUCE

    @property
    def is_leased(self) -> bool:
        return self in (Mode.BOUNDED, Mode.ASYNC)


class FaultKind(StrEnum):
    """What a fault does; `faults.py` has a function for each."""

    KILL = "kill"  # a worker
    PAIR = "pair"  # two workers at once
    ALL = "all"  # all workers at once
    STOP = "stop"  # a worker stands still, then continues
    COORDINATOR = "coordinator"  # killed
    PAUSE = "pause"  # the coordinator stands still, then continues
    AGENT = "agent"  # a host's agent is killed; that of host 0 is resumed
    HEAD = "head"  # host 0 is lost with all that runs there; another host goes on
    LOADER = "loader"  # a loader worker is killed
    SERVER = "server"  # killed
    CUT = "cut"  # a host's cable is pulled
    ONEWAY = "oneway"  # what a host sends is lost
    PARTIAL = "partial"  # two hosts do not reach each other
    SLOW = "slow"  # a host's link is slow
    DISK = "disk"  # the disk of host 0 is full
    DRAIN = "drain"  # a worker is asked to leave
    JOIN = "join"  # one more worker, on a host of the run or on a new one
    INVITE = "invite"  # two hosts use an invitation for one
    RESUME = "resume"  # paceline stop, then --resume
    TERM = "term"  # SIGTERM to every process at once, then --resume


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: FaultKind
    target: int = 0
    length_s: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.at_s:g}", self.kind.value]
        if self.target or self.length_s:
            parts.append(str(self.target))
        if self.length_s:
            parts.append(f"{self.length_s:g}")
        return " ".join(parts)

    @property
    def ends_s(self) -> float:
        return self.at_s + self.length_s


@dataclass(frozen=True)
class Schedule:
    """`workers` are started on each host; `servers` are in all (`servers_on`). With `evaluates` the script validates
    after every epoch."""

    mode: Mode
    hosts: int = 1
    workers: int = 2
    servers: int = 0
    replicas: int = 1
    loaders: int = 0
    evaluates: int = 0
    seed: int = 0
    faults: tuple[Fault, ...] = ()

    def __post_init__(self) -> None:
        if not (1 <= self.hosts <= 4 and 1 <= self.workers <= 4 and 0 <= self.servers <= 8):
            raise ValueError(f"{self}: give 1 to 4 hosts, 1 to 4 workers on each, and up to 8 servers")
        if self.mode.has_servers != bool(self.servers):
            raise ValueError(f"{self}: the mode {self.mode} needs servers={'1 or more' * self.mode.has_servers or 0}")
        if self.replicas not in (1, 2) or self.replicas > max(1, self.servers):
            raise ValueError(f"{self}: replicas={self.replicas} must be 1, or 2 with two servers or more")
        if list(self.faults) != sorted(self.faults, key=lambda fault: fault.at_s):
            raise ValueError(f"{self}: faults must stand in order of time")

    def __str__(self) -> str:
        faults = "; ".join(str(fault) for fault in self.faults)
        shape = " ".join(f"{name}={getattr(self, name)}" for name in _SHAPE)
        return f"{self.mode.value} {shape}: {faults}"

    @property
    def needs_lab(self) -> bool:
        """Whether it takes network namespaces, and so root."""
        return self.num_places > 1

    @property
    def num_places(self) -> int:
        """How many hosts there are at its end, those included that join meanwhile."""
        extra = {fault.target for fault in self.faults if fault.kind in (FaultKind.JOIN, FaultKind.INVITE)}
        return max([self.hosts, *(min(target, self.hosts) + 1 for target in extra)])

    def servers_on(self, host: int) -> int:
        """Host 0 begins with as many as there are replicas; the others get the rest in turn."""
        rest = self.servers - self.replicas
        hosts = [number % self.hosts for number in range(1, rest + 1)] + [0] * min(self.servers, self.replicas)
        return hosts.count(host)

    def without(self, number: int) -> Schedule:
        """Less one fault."""
        return replace(self, faults=self.faults[:number] + self.faults[number + 1 :])


_SHAPE = ("hosts", "workers", "servers", "replicas", "loaders", "evaluates", "seed")


def parse(text: str) -> Schedule:
    """The inverse of `str`. Raises `ValueError` that says what cannot be read."""
    head, colon, tail = text.partition(":")
    words = head.split()
    if not colon or not words:
        raise ValueError(f"{text!r} is no schedule; it looks like: {Schedule(Mode.ALLREDUCE)}")
    shape: dict[str, Any] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in _SHAPE or not value.isdigit():
            raise ValueError(f"{word!r} is none of {', '.join(f'{one}=NUMBER' for one in _SHAPE)}")
        shape[name] = int(value)
    faults = tuple(_parse_fault(part.split()) for part in tail.split(";") if part.strip())
    return Schedule(Mode(words[0]), faults=faults, **shape)


def _parse_fault(words: list[str]) -> Fault:
    try:
        at_s, kind, *rest = words
        target = int(rest[0]) if rest else 0
        length_s = float(rest[1]) if len(rest) > 1 else 0.0
        return Fault(float(at_s), FaultKind(kind), target, length_s)
    except (ValueError, IndexError) as error:
        raise ValueError(f"{' '.join(words)!r} is no fault (SECONDS KIND [TARGET [LENGTH]]): {error}") from error
