"""Longer than a test may take: `make soak`. Nothing grows over thousands of operations, deaths and groups."""

from __future__ import annotations

import os
import resource
from typing import Any

import pytest
import torch

from paceline.collective import Group
from paceline.errors import PeerLost
from paceline.testing.crew import Crew, say

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]


def footprint(group: Group) -> tuple[int, int, int]:
    """Open files, shared memory of this member, peak memory of the process in KiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return len(os.listdir("/proc/self/fd")), group.committed_bytes(), peak


def many_operations(group: Group, rounds: int) -> Any:
    found = []
    arena = group.empty((300_000,)).zero_()
    ordinary = torch.zeros(300_000)
    for count in range(rounds):
        for tensor in (arena, ordinary, arena[:100], ordinary[:100]):
            group.all_reduce(tensor)
        group.all_gather([torch.zeros(1000) for _ in range(group.size)], torch.zeros(1000))
        group.empty((count % 1000 + 1,)).fill_(1.0)
        if count in (rounds // 5, rounds - 1):
            found.append(footprint(group))
    return found


@pytest.mark.parametrize("layout", ["aa", "aaaa", "ab", "aabb"])
def test_nothing_grows_over_ten_thousand_operations(layout: str) -> None:
    with Crew(len(layout), hosts=layout, timeout_s=2000) as crew:
        for early, late in crew.run(many_operations, 2000):
            assert late[0] == early[0]
            assert late[1] <= early[1]
            assert late[2] - early[2] < 20 * 1024


def die_and_go_on(group: Group) -> Any:
    """The last rank dies, the others regroup, until two are left."""
    current = group
    while True:
        say("working")
        try:
            while True:
                current.all_reduce(torch.ones(1000))
        except PeerLost as lost:
            following = current.regroup([rank for rank in range(current.size) if rank != lost.rank])
            current.close()
            current = following
        if current.size == 2:
            total = torch.ones(1)
            current.all_reduce(total)
            current.close()
            return float(total)


@pytest.mark.parametrize("layout", ["aaaaaa", "abcdef", "aabbcc"])
def test_one_after_the_other_dies(layout: str) -> None:
    with Crew(6, hosts=layout) as crew:
        crew.start(die_and_go_on)
        for victim in (5, 4, 3, 2):
            for rank in range(victim + 1):
                crew.hear(rank)
            crew.kill(victim)
        assert crew.finish([0, 1]) == [2.0, 2.0]
