"""A legal schedule from a seed. Pure: the same seed gives the same schedule on every machine.

Legal means that the docs promise what comes of it. Faults are far enough from each other for one to be seen by itself
in most cases, and near enough for the run to be still recovering from the last one in many.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from paceline.testing.chaos.schedule import Fault, FaultKind, Mode, Schedule

SILENCE_S = 5.0  # after which the product evicts a silent member
SHORT_S = (0.5, 2.5)  # well below that
LONG_S = (6.5, 8.5)  # well above it
LASTING = (
    FaultKind.STOP,
    FaultKind.PAUSE,
    FaultKind.CUT,
    FaultKind.ONEWAY,
    FaultKind.PARTIAL,
    FaultKind.SLOW,
    FaultKind.DISK,
)
_STARTS_ANEW = (FaultKind.RESUME, FaultKind.TERM, FaultKind.AGENT, FaultKind.HEAD, FaultKind.ALL)
_FIRST_S = (0.5, 2.0)
_BETWEEN_S = (0.7, 4.0)
_TRIALS = 200  # of shapes in which the kind of a seed is legal


def draw(seed: int, *, most_hosts: int = 4, mode: Mode | None = None, has_root: bool = True) -> Schedule:
    """The schedule of a seed. With `most_hosts=1` it needs no network namespaces, and without root no small disk.

    Each seed has a kind of fault that it must show: 20 seeds in a row have every kind, 100 every kind in every mode,
    200 also with one replica and with two. All else is drawn."""
    rng = random.Random(f"paceline chaos {seed}")
    among = [kind for kind in FaultKind if has_root or kind is not FaultKind.DISK]
    lead, in_turn, replicas = _in_turn(seed, among)
    for _ in range(_TRIALS):
        schedule = _shape(seed, rng, most_hosts, mode or in_turn, replicas)
        if is_legal(schedule, [], lead):
            return _with_faults(schedule, rng, among, lead)
    return _with_faults(schedule, rng, among, None)  # there are too few hosts, or no servers


def _in_turn(seed: int, among: list[FaultKind]) -> tuple[FaultKind, Mode, int]:
    """The kind that the schedule of a seed must show, its mode, and its replicas."""
    modes = list(Mode)
    round_number, number = divmod(seed, len(among) * len(modes))
    step = -(-len(among) // len(modes))  # seeds in a row have kinds that are far apart
    row, column = divmod(number, len(modes))
    return among[(row + step * column) % len(among)], modes[column], 1 + (row + column + round_number) % 2


def _shape(seed: int, rng: random.Random, most_hosts: int, mode: Mode, replicas: int) -> Schedule:
    hosts = min(most_hosts, rng.choices((1, 2, 3, 4), weights=(4, 3, 2, 2))[0])
    workers = {1: rng.choice((2, 2, 3)), 2: rng.choice((1, 2))}.get(hosts, 1)  # each takes seconds to start
    replicas = replicas if mode.has_servers else 1
    servers = rng.choice((replicas, 2, 2, 3)) if mode.has_servers else 0
    return Schedule(mode, hosts, workers, servers, replicas, rng.choice((0, 0, 1)), rng.choice((0, 1)), seed)


def _with_faults(schedule: Schedule, rng: random.Random, among: list[FaultKind], lead: FaultKind | None) -> Schedule:
    faults: list[Fault] = []
    at_s = rng.uniform(*_FIRST_S)
    count = rng.choice((1, 2, 3, 3, 4))
    turn = rng.randrange(count)  # of the lead
    for number in range(count):
        kinds = [kind for kind in among if is_legal(schedule, faults, kind)]
        if lead is not None and number < turn:  # nothing that would make the lead illegal
            kinds = [kind for kind in kinds if is_legal(schedule, [*faults, Fault(at_s, kind)], lead)]
        kind = lead if lead is not None and number == turn else rng.choice(kinds)
        fault = Fault(round(at_s, 1), kind, _target(schedule, kind, rng), _length(kind, rng))
        faults.append(fault)
        # A fault that lasts may be joined by the next one, or not.
        at_s = (fault.at_s if rng.random() < 0.3 else fault.ends_s) + rng.uniform(*_BETWEEN_S)
    return replace(schedule, faults=tuple(faults))


def is_legal(schedule: Schedule, before: list[Fault], kind: FaultKind) -> bool:
    """Whether the docs say what comes of this fault after those."""
    needed: dict[FaultKind, Callable[[], bool]] = {
        FaultKind.PAIR: lambda: schedule.hosts * schedule.workers >= 3,
        FaultKind.LOADER: lambda: schedule.loaders > 0,
        FaultKind.SERVER: lambda: schedule.servers > 0,
        FaultKind.CUT: lambda: schedule.hosts > 1,
        FaultKind.ONEWAY: lambda: schedule.hosts > 1,
        FaultKind.SLOW: lambda: schedule.hosts > 1,
        FaultKind.PARTIAL: lambda: schedule.hosts > 2,
        # One that was drained does not come back: at least two are to be left, should one die besides.
        FaultKind.DRAIN: lambda: _times(before, FaultKind.DRAIN) + 3 <= schedule.hosts * schedule.workers,
        FaultKind.JOIN: lambda: _times(before, FaultKind.JOIN, FaultKind.INVITE) == 0,
        FaultKind.INVITE: lambda: _times(before, FaultKind.JOIN, FaultKind.INVITE) == 0,
        # A start of everything takes long: one of these in a schedule.
        **{one: lambda: _times(before, *_STARTS_ANEW) == 0 for one in _STARTS_ANEW},
        FaultKind.HEAD: lambda: schedule.hosts > 1 and _times(before, *_STARTS_ANEW) == 0,
        # The small disk is that of the first host.
        FaultKind.DISK: lambda: _times(before, FaultKind.DISK, FaultKind.HEAD) == 0,
    }
    return needed.get(kind, lambda: True)()


def _times(faults: list[Fault], *kinds: FaultKind) -> int:
    return sum(1 for fault in faults if fault.kind in kinds)


def _target(schedule: Schedule, kind: FaultKind, rng: random.Random) -> int:
    if kind in (FaultKind.CUT, FaultKind.ONEWAY, FaultKind.SLOW):
        return rng.randrange(1, schedule.hosts)  # not the coordinator's host: what its loss costs is another promise
    if kind is FaultKind.AGENT:
        return rng.randrange(schedule.hosts)
    if kind is FaultKind.HEAD:
        return rng.randrange(2)  # with its cable, or its processes only
    if kind in (FaultKind.JOIN, FaultKind.INVITE):
        return rng.choice((0, schedule.hosts)) if schedule.hosts > 1 else 0
    if kind is FaultKind.PARTIAL:
        return rng.randrange(schedule.hosts * (schedule.hosts - 1) // 2)
    if kind in (FaultKind.KILL, FaultKind.PAIR, FaultKind.STOP, FaultKind.LOADER, FaultKind.SERVER, FaultKind.DRAIN):
        return rng.randrange(4)
    return 0


def _length(kind: FaultKind, rng: random.Random) -> float:
    if kind not in LASTING:
        return 0.0
    bounds = rng.choice((SHORT_S, LONG_S))
    if kind is FaultKind.PARTIAL:
        bounds = LONG_S
    return round(rng.uniform(*bounds), 1)
