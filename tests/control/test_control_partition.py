"""Which hosts go on together when some cannot reach each other."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.machines.partition import MOST_EXACT, HostWeight, hosts_to_keep


def weights(*num_workers: int) -> list[HostWeight]:
    return [HostWeight(f"h{number:02}", count, 7) for number, count in enumerate(num_workers)]


def kept(hosts: list[HostWeight], *cut: tuple[int, int]) -> list[int]:
    names = [host.name for host in hosts]
    found = hosts_to_keep(hosts, [(names[one], names[other]) for one, other in cut])
    return sorted(names.index(name) for name in found)


def test_where_all_reach_each_other_all_go_on() -> None:
    assert kept(weights(1, 2, 3)) == [0, 1, 2]
    assert kept([]) == []
    assert kept(weights(1)) == [0]


def test_one_direction_is_enough_to_part_two_hosts() -> None:
    for cut in ([(1, 2)], [(2, 1)], [(1, 2), (2, 1)]):
        assert kept(weights(1, 1, 1), *cut) == [0, 1]


def test_most_workers_go_on() -> None:
    assert kept(weights(1, 1, 3), (1, 2)) == [0, 2]
    assert kept(weights(4, 3, 3), (0, 1), (0, 2)) == [1, 2]


def test_of_as_many_workers_those_go_on_that_have_come_furthest() -> None:
    hosts = [HostWeight("a", 1, 7), HostWeight("b", 1, 7), HostWeight("c", 1, 8)]
    assert hosts_to_keep(hosts, [("b", "c")]) == {"a", "c"}
    hosts = [HostWeight("a", 1, 7, has_coordinator=True), HostWeight("b", 1, 8)]
    assert hosts_to_keep(hosts, [("a", "b")]) == {"b"}


def test_of_equal_sets_the_one_with_the_coordinator_goes_on() -> None:
    hosts = [HostWeight("a", 1, 7), HostWeight("b", 1, 7), HostWeight("c", 1, 7, has_coordinator=True)]
    assert hosts_to_keep(hosts, [("a", "b"), ("a", "c")]) == {"b", "c"}
    assert hosts_to_keep(hosts, [("a", "c"), ("b", "c"), ("a", "b")]) == {"c"}


def test_what_else_is_equal_is_told_apart_by_name() -> None:
    assert kept(weights(1, 1, 1, 1), (0, 1), (2, 3), (0, 3), (1, 2)) == [0, 2]
    assert kept(list(reversed(weights(1, 1, 1))), (0, 1)) == [1, 2]  # the order in which hosts are given is nothing


def test_strangers_and_complaints_of_oneself_mean_nothing() -> None:
    assert hosts_to_keep(weights(1, 1), [("h00", "h00"), ("h00", "elsewhere")]) == {"h00", "h01"}


HOSTS = st.lists(st.tuples(st.integers(1, 3), st.integers(5, 7), st.booleans()), min_size=1, max_size=8).map(
    lambda rows: [HostWeight(f"h{number}", *row) for number, row in enumerate(rows)]
)


@given(HOSTS, st.integers(0, 2**32 - 1), st.floats(0.0, 1.0))
@settings(max_examples=400, deadline=None)
def test_the_best_of_all_sets_is_found(hosts: list[HostWeight], seed: int, density: float) -> None:
    chance = random.Random(seed)
    pairs = [pair for pair in itertools.combinations([host.name for host in hosts], 2) if chance.random() < density]

    def is_clique(subset: tuple[HostWeight, ...]) -> bool:
        return not any((one.name, other.name) in pairs for one, other in itertools.combinations(subset, 2))

    def value(subset: tuple[HostWeight, ...]) -> tuple[object, ...]:
        names = {host.name for host in subset}
        return (
            sum(host.num_workers for host in subset),
            max(host.applied for host in subset),
            any(host.has_coordinator for host in subset),
            [host.name in names for host in hosts],
        )

    subsets = (subset for size in range(1, len(hosts) + 1) for subset in itertools.combinations(hosts, size))
    best = max((subset for subset in subsets if is_clique(subset)), key=value)
    assert hosts_to_keep(hosts, pairs) == {host.name for host in best}


@pytest.mark.parametrize("num_hosts", [MOST_EXACT, MOST_EXACT + 1, 60])
@pytest.mark.parametrize("seed", range(5))
def test_many_hosts_are_decided_soon_and_nobody_who_fits_is_left_out(num_hosts: int, seed: int) -> None:
    chance = random.Random(seed)
    hosts = [HostWeight(f"h{number:03}", chance.randint(1, 4), 5) for number in range(num_hosts)]
    names = [host.name for host in hosts]
    cut = {pair for pair in itertools.combinations(names, 2) if chance.random() < 0.1 * (seed + 1)}
    found = hosts_to_keep(hosts, cut)

    def fits(name: str, others: set[str]) -> bool:
        return not any((name, other) in cut or (other, name) in cut for other in others)

    assert all(fits(name, set(found) - {name}) for name in found)
    assert not any(fits(name, set(found)) for name in names if name not in found)


def test_the_graph_with_most_cliques_is_decided_soon() -> None:
    """Hosts in threes that cannot reach each other: of all graphs this one has most cliques to choose from."""
    hosts = weights(*[1] * MOST_EXACT)
    cut = [pair for pair in itertools.combinations(range(MOST_EXACT), 2) if pair[0] // 3 == pair[1] // 3]
    assert kept(hosts, *cut) == [number for number in range(MOST_EXACT) if number % 3 == 0]


def test_above_what_is_exact_one_bad_host_goes_and_all_others_stay() -> None:
    hosts = weights(*[2] * (MOST_EXACT + 10))
    cut = [(5, other) for other in range(MOST_EXACT + 10) if other != 5]
    assert kept(hosts, *cut) == [number for number in range(MOST_EXACT + 10) if number != 5]
