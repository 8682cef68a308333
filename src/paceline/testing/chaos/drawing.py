"""A legal schedule from a seed. Pure: the same seed gives the same schedule on every machine.

Legal means that the docs promise what comes of it. Faults are far enough from each other for one to be seen by itself
in most cases, and near enough for the run to be still recovering from the last one in many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from paceline.testing.chaos.schedule import Fault, Kind, Mode, Schedule

SILENCE_S = 5.0  # after which the product evicts a silent member
SHORT_S = (0.5, 2.5)  # well below that
LONG_S = (6.5, 8.5)  # well above it
LASTING = (Kind.STOP, Kind.PAUSE, Kind.CUT, Kind.ONEWAY, Kind.PARTIAL, Kind.SLOW, Kind.DISK)
_ENDS_RUN = (Kind.RESUME, Kind.TERM)
_FIRST_S = (0.5, 2.0)
_BETWEEN_S = (0.7, 4.0)


def draw(seed: int, *, most_hosts: int = 4, mode: Mode | None = None, has_root: bool = True) -> Schedule:
    """The schedule of a seed. With `most_hosts=1` it needs no network namespaces, and without root no small disk."""
    rng = random.Random(f"paceline chaos {seed}")
    mode = mode or list(Mode)[seed % len(Mode)]
    hosts = min(most_hosts, rng.choices((1, 2, 3, 4), weights=(6, 4, 2, 1))[0])
    workers = {1: rng.choice((2, 2, 3)), 2: rng.choice((1, 2))}.get(hosts, 1)  # each takes seconds to start
    replicas = rng.choice((1, 2)) if mode.has_servers else 1
    servers = rng.choice((replicas, 2, 2, 3)) if mode.has_servers else 0
    loaders = rng.choice((0, 0, 1))
    evaluates = rng.choice((0, 1))
    schedule = Schedule(mode, hosts, workers, servers, replicas, loaders, evaluates, seed)
    return _with_faults(schedule, rng, [kind for kind in Kind if has_root or kind is not Kind.DISK])


def _with_faults(schedule: Schedule, rng: random.Random, among: list[Kind]) -> Schedule:
    faults: list[Fault] = []
    at_s = rng.uniform(*_FIRST_S)
    for _ in range(rng.choice((1, 2, 3, 3, 4))):
        kinds = [kind for kind in among if is_legal(schedule, faults, kind)]
        kind = rng.choice(kinds)
        fault = Fault(round(at_s, 1), kind, _target(schedule, kind, rng), _length(kind, rng))
        faults.append(fault)
        # A fault that lasts may be joined by the next one, or not.
        at_s = (fault.at_s if rng.random() < 0.3 else fault.ends_s) + rng.uniform(*_BETWEEN_S)
    return replace(schedule, faults=tuple(faults))


def is_legal(schedule: Schedule, before: list[Fault], kind: Kind) -> bool:
    """Whether the docs say what comes of this fault after those."""
    needed: dict[Kind, Callable[[], bool]] = {
        Kind.PAIR: lambda: schedule.hosts * schedule.workers >= 3,
        Kind.LOADER: lambda: schedule.loaders > 0,
        Kind.SERVER: lambda: schedule.servers > 0,
        Kind.CUT: lambda: schedule.hosts > 1,
        Kind.ONEWAY: lambda: schedule.hosts > 1,
        Kind.SLOW: lambda: schedule.hosts > 1,
        Kind.PARTIAL: lambda: schedule.hosts > 2,
        # One that was drained does not come back: at least two are to be left, should one die besides.
        Kind.DRAIN: lambda: _times(before, Kind.DRAIN) + 3 <= schedule.hosts * schedule.workers,
        Kind.JOIN: lambda: _times(before, Kind.JOIN, Kind.INVITE) == 0,
        Kind.INVITE: lambda: _times(before, Kind.JOIN, Kind.INVITE) == 0,
        # A start of everything takes long: one of these in a schedule.
        **{one: lambda: _times(before, *_ENDS_RUN, Kind.AGENT, Kind.ALL) == 0 for one in (*_ENDS_RUN, Kind.AGENT)},
        Kind.ALL: lambda: _times(before, *_ENDS_RUN, Kind.AGENT, Kind.ALL) == 0,
        Kind.DISK: lambda: _times(before, Kind.DISK) == 0,
    }
    return needed.get(kind, lambda: True)()


def _times(faults: list[Fault], *kinds: Kind) -> int:
    return sum(1 for fault in faults if fault.kind in kinds)


def _target(schedule: Schedule, kind: Kind, rng: random.Random) -> int:
    if kind in (Kind.CUT, Kind.ONEWAY, Kind.SLOW):
        return rng.randrange(1, schedule.hosts)  # not the coordinator's host: what its loss costs is another promise
    if kind is Kind.AGENT:
        return rng.randrange(schedule.hosts)
    if kind in (Kind.JOIN, Kind.INVITE):
        return rng.choice((0, schedule.hosts)) if schedule.hosts > 1 else 0
    if kind is Kind.PARTIAL:
        return rng.randrange(schedule.hosts * (schedule.hosts - 1) // 2)
    if kind in (Kind.KILL, Kind.PAIR, Kind.STOP, Kind.LOADER, Kind.SERVER, Kind.DRAIN):
        return rng.randrange(4)
    return 0


def _length(kind: Kind, rng: random.Random) -> float:
    if kind not in LASTING:
        return 0.0
    bounds = rng.choice((SHORT_S, LONG_S))
    if kind is Kind.PARTIAL:
        bounds = LONG_S
    return round(rng.uniform(*bounds), 1)
