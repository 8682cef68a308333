"""Groups over real network namespaces: members of different hosts never share memory, deaths and cut cables are
noticed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.collective import Group
from paceline.errors import DeadlineExceeded, PeerLost
from paceline.testing import netlab
from paceline.testing.crew import Crew, say
from paceline.testing.netlab import Netlab

pytestmark = pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")


@pytest.fixture(scope="module")
def lab() -> Iterator[Netlab]:
    with Netlab(4) as lab:
        yield lab


def reduce_and_tell_hosts(group: Group) -> Any:
    for algorithm in ("auto", "ring", "tree", "hierarchical"):
        tensor = torch.full((100_000,), float(group.rank))
        group.all_reduce(tensor, algorithm=algorithm)
        assert bool((tensor == sum(range(group.size))).all())
    return group.hosts, len(group._parts.local.neighbours)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize(("layout", "hosts", "neighbours"), [("abcd", 4, 0), ("aabb", 2, 1), ("aab", 2, None)])
def test_memory_is_shared_inside_a_namespace_only(
    lab: Netlab, layout: str, hosts: int, neighbours: int | None, tls: bool
) -> None:
    with Crew(len(layout), hosts=layout, lab=lab.hosts, tls=tls) as crew:
        for found, num_neighbours in crew.run(reduce_and_tell_hosts):
            assert len(found) == hosts
            assert neighbours is None or num_neighbours == neighbours


def wait_for_death(group: Group) -> Any:
    tensor = torch.zeros(100_000)
    group.all_reduce(tensor)
    say("under way")
    while True:
        try:
            group.all_reduce(tensor)
        except PeerLost as error:
            return error


@pytest.mark.parametrize("tls", [False, True])
def test_a_death_on_another_host_is_named(lab: Netlab, tls: bool) -> None:
    with Crew(4, hosts="aabc", lab=lab.hosts, tls=tls) as crew:
        crew.start(wait_for_death)
        for rank in range(4):
            crew.hear(rank)
        crew.kill(2)
        for error in crew.finish([0, 1, 3], timeout_s=5.0):
            assert error.rank == 2


def reduce_once(group: Group) -> None:
    group.all_reduce(torch.zeros(1000))


def reduce_over_cut_cable(group: Group) -> Any:
    try:
        group.all_reduce(torch.zeros(1000), timeout_s=1.0)
    except (DeadlineExceeded, PeerLost) as error:
        return str(error)
    return "no error"


def test_a_cut_cable_ends_at_the_deadline(lab: Netlab) -> None:
    with Crew(2, hosts="ab", lab=lab.hosts) as crew:
        crew.run(reduce_once)
        lab.hosts[1].cut()
        try:
            texts = crew.run(reduce_over_cut_cable)
        finally:
            lab.hosts[1].mend()
        assert "rank 1" in texts[0]
        assert "rank 0" in texts[1]


def wait_for_a_dead_path(group: Group) -> Any:
    """All wait for rank 0, and rank 0 for rank 1, which says nothing."""
    tensor = torch.zeros(1000)
    group.all_reduce(tensor)
    say("under way")
    try:
        group.recv(tensor, 1 if group.rank == 0 else 0, timeout_s=200.0)
    except PeerLost as error:
        return error
    return "no error"


def test_a_path_that_carries_nothing_is_noticed_though_nobody_uses_it(lab: Netlab) -> None:
    with Crew(3, hosts="abc", lab=lab.hosts, tls=True) as crew:
        crew.start(wait_for_a_dead_path)
        for rank in range(3):
            crew.hear(rank)
        lab.hosts[1].lose(lab.hosts[2])
        try:
            errors = crew.finish(timeout_s=90.0)
        finally:
            lab.hosts[1].find(lab.hosts[2])
        # Who notices first tells the others; which of the two it is, is chance.
        assert {error.rank for error in errors} <= {1, 2}
        assert not any(error.died for error in errors)
