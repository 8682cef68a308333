"""Which hosts go on together when some cannot reach each other: a pure function.

Hosts are nodes; between two of them is an edge if neither complains of the other. All members of a group talk to each
other, so those that go on must be a clique. Of all cliques the best is kept:

    1. the one with most workers,
    2. then with the highest operation that one of its workers has applied: least is done again,
    3. then the one with the coordinator's host: it can be reached for longest,
    4. then by name: at the first host, in order, that one has and the other has not, the one that has it.

Up to `MOST_EXACT` hosts the answer is exact (branch and bound over sets as bits); above that it is greedy, and still a
clique to which no host can be added.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

MOST_EXACT = 32

# How good a set of hosts is; greater is better.
_Score = tuple[int, int, bool]


class HostWeight(msgspec.Struct, frozen=True):
    """What speaks for keeping a host: its workers, the highest operation one of them has applied, whether the
    coordinator is there."""

    name: str
    num_workers: int
    applied: int
    has_coordinator: bool = False


def hosts_to_keep(hosts: Iterable[HostWeight], cut: Collection[tuple[str, str]]) -> frozenset[str]:
    """The names of the hosts that go on. `cut` has pairs, in either order or both, of which one cannot reach the
    other; pairs of a host with itself, or with one that is not among `hosts`, mean nothing."""
    ordered = sorted(hosts, key=lambda host: host.name)
    index = {host.name: number for number, host in enumerate(ordered)}
    edges = [(1 << len(ordered)) - 1 & ~(1 << number) for number in range(len(ordered))]
    for one, other in cut:
        if one != other and one in index and other in index:
            edges[index[one]] &= ~(1 << index[other])
            edges[index[other]] &= ~(1 << index[one])
    chosen = _exact(ordered, edges) if len(ordered) <= MOST_EXACT else _greedy(ordered, edges)
    return frozenset(host.name for number, host in enumerate(ordered) if chosen >> number & 1)


def _exact(hosts: Sequence[HostWeight], edges: Sequence[int]) -> int:
    """Hosts are taken in order, first with and then without each; so the first of several that are equally good is the
    one that rule 4 prefers, and a branch that could only be as good need not be looked at."""
    best, best_score = 0, _score(hosts, 0)

    def extend(taken: int, candidates: int) -> None:
        nonlocal best, best_score
        if (score := _score(hosts, taken)) > best_score:
            best, best_score = taken, score
        while candidates and _bound(hosts, edges, taken, candidates) > best_score:
            lowest = candidates & -candidates
            extend(taken | lowest, candidates & edges[lowest.bit_length() - 1])
            candidates &= ~lowest

    extend(0, (1 << len(hosts)) - 1)
    return best


def _score(hosts: Sequence[HostWeight], taken: int) -> _Score:
    found = [hosts[number] for number in _numbers(taken)]
    num_workers = sum(host.num_workers for host in found)
    applied = max((host.applied for host in found), default=-1)
    return num_workers, applied, any(host.has_coordinator for host in found)


def _bound(hosts: Sequence[HostWeight], edges: Sequence[int], taken: int, candidates: int) -> _Score:
    """No clique of what is taken and some of the candidates is better. Candidates are coloured so that two of one
    colour have no edge: a clique has one of each colour at most."""
    num_workers, applied, has_coordinator = _score(hosts, taken | candidates)
    num_workers = _score(hosts, taken)[0]
    left = candidates
    while left:
        free, most = left, 0
        while free:
            lowest = free & -free
            number = lowest.bit_length() - 1
            most = max(most, hosts[number].num_workers)
            left &= ~lowest
            free &= ~lowest & ~edges[number]
        num_workers += most
    return num_workers, applied, has_coordinator


def _greedy(hosts: Sequence[HostWeight], edges: Sequence[int]) -> int:
    """Let go, one after the other, of who lacks most others; at the end take back who fits after all."""
    everybody = kept = (1 << len(hosts)) - 1

    def lacking(number: int, among: int) -> int:
        return sum(hosts[other].num_workers for other in _numbers(among & ~edges[number] & ~(1 << number)))

    def worth(number: int) -> tuple[int, int, bool, int]:
        host = hosts[number]
        return host.num_workers, host.applied, host.has_coordinator, -number

    while True:
        lacks = {number: lacking(number, kept) for number in _numbers(kept)}
        if not any(lacks.values()):
            break
        worst = max(lacks, key=lambda number: (lacks[number] - hosts[number].num_workers, _negated(worth(number))))
        kept &= ~(1 << worst)
    for number in sorted(_numbers(everybody & ~kept), key=worth, reverse=True):
        if not kept & ~edges[number]:
            kept |= 1 << number
    return kept


def _negated(worth: tuple[int, int, bool, int]) -> tuple[int, int, int, int]:
    num_workers, applied, has_coordinator, order = worth
    return -num_workers, -applied, -has_coordinator, -order


def _numbers(bits: int) -> list[int]:
    found = []
    while bits:
        lowest = bits & -bits
        found.append(lowest.bit_length() - 1)
        bits &= ~lowest
    return found
