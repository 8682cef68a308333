"""Latency and bandwidth of every link, one pair of hosts at a time: nothing else of ours is under way meanwhile.

Latency is half the median round trip of one small message. Bandwidth is that of one message, made larger until it takes
a while, from its start to the word that it has come, less the time of that word. Both are of the group's own
connections, with their TLS.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch

from paceline.collective.group import Group

if TYPE_CHECKING:
    from paceline.cli.bench.links.gathering import GatheredHosts

OPERATION_S = 120.0
NUM_PINGS = 20
FIRST_BYTES, MOST_BYTES, GROWTH = 1 << 16, 1 << 26, 4
LONG_ENOUGH_S = 0.25
CHOICE_BYTES = (1 << 10, 1 << 16, 1 << 20, 16 << 20, 100 << 20)

_NUM_WARM = 2
_STOP = 0

# Called before each pair is measured, with the names of the two.
OnPair = Callable[[str, str], None]


class LinkChoice(msgspec.Struct, frozen=True):
    """What `auto` would do with a tensor of that size, and how long it would take by its cost model."""

    num_bytes: int
    algorithm: str
    seconds: float


class LinkFigures(msgspec.Struct, frozen=True):
    """`latency_ms[a][b]` and `mb_per_s[a][b]` are of the link from host a to host b; the same on every host."""

    names: tuple[str, ...]
    latency_ms: tuple[tuple[float, ...], ...]
    mb_per_s: tuple[tuple[float, ...], ...]
    choices: tuple[LinkChoice, ...]


def measure_links(gathered: GatheredHosts, on_pair: OnPair) -> LinkFigures:
    """Called on all hosts; forms their group, and closes it with the endpoint."""
    names = gathered.hosts.names
    cards = [host.card for host in gathered.hosts.hosts]
    name = f"links {gathered.hosts.run}"
    with Group.form(gathered.endpoint, cards, gathered.rank, name=name, timeout_s=OPERATION_S, ephemeral=True) as group:
        found = torch.zeros(2, group.size, group.size, dtype=torch.float64)
        for sender, receiver in itertools.permutations(range(group.size), 2):
            group.barrier()
            on_pair(names[sender], names[receiver])
            if group.rank == sender:
                latency_s = _ping(group, receiver)
                found[0, sender, receiver] = latency_s * 1e3
                found[1, sender, receiver] = _stream(group, receiver, latency_s) / 1e6
            elif group.rank == receiver:
                _pong(group, sender)
                _drain(group, sender)
        group.all_reduce(found)  # every figure is on one host, and zero on the others
        choices = [
            LinkChoice(num_bytes, chosen, group.model.predict_s(chosen, num_bytes))
            for num_bytes in CHOICE_BYTES
            for chosen in [group.model.choose(num_bytes)]
        ]
        group.barrier()
    latency, bandwidth = (_rows(figures) for figures in found.tolist())
    return LinkFigures(names, latency, bandwidth, tuple(choices))


def _rows(figures: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in figures)


# -- one pair ----------------------------------------------------------------------------------------------------------


def _ping(group: Group, receiver: int) -> float:
    """Seconds, one way."""
    word, trips = torch.zeros(1), []
    for _ in range(_NUM_WARM + NUM_PINGS):
        began = time.perf_counter()
        group.send(word, receiver)
        group.recv(word, receiver)
        trips.append(time.perf_counter() - began)
    return statistics.median(trips[_NUM_WARM:]) / 2


def _pong(group: Group, sender: int) -> None:
    word = torch.zeros(1)
    for _ in range(_NUM_WARM + NUM_PINGS):
        group.recv(word, sender)
        group.send(word, sender)


def _stream(group: Group, receiver: int, latency_s: float) -> float:
    """Bytes a second. The sizes before the last one warm the connection up."""
    word = torch.zeros(1)
    num_bytes, rate = FIRST_BYTES, 0.0
    while num_bytes <= MOST_BYTES:
        message = torch.zeros(num_bytes, dtype=torch.uint8)
        group.send(torch.tensor([num_bytes]), receiver)
        group.recv(word, receiver)  # the receiver has its memory ready
        began = time.perf_counter()
        group.send(message, receiver)
        group.recv(word, receiver)
        took = time.perf_counter() - began
        rate = num_bytes / max(took - latency_s, took / 2)
        if took >= LONG_ENOUGH_S:
            break
        num_bytes *= GROWTH
    group.send(torch.tensor([_STOP]), receiver)
    return rate


def _drain(group: Group, sender: int) -> None:
    word, size = torch.zeros(1), torch.zeros(1, dtype=torch.int64)
    while True:
        group.recv(size, sender)
        if (num_bytes := int(size)) == _STOP:
            return
        message = torch.zeros(num_bytes, dtype=torch.uint8)
        group.send(word, sender)
        group.recv(message, sender)
        group.send(word, sender)
