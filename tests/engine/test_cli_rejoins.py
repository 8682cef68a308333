"""Workers on several hosts are killed and replaced, further hosts join: the run goes on, each sample counts once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.fleet import Fleet
from paceline.testing import netlab
from paceline.testing.netlab import Netlab

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or ""),
]


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with Netlab(3) as lab:
        yield lab


def kill_and_replace(fleet: Fleet, rank: int) -> None:
    """The survivors are the same processes as before, and a new one has the place of the dead."""
    before = fleet.workers()
    victim = before[rank].pid
    os.kill(victim, signal.SIGKILL)
    after = {row.pid for row in fleet.wait_for_workers(len(before), without=[victim])}
    assert {row.pid for row in before} - {victim} < after


def check_counts(fleet: Fleet, num_workers: int) -> None:
    fleet.finish()
    counted = fleet.counts()
    assert len(counted) == num_workers
    for least, most, epochs in counted:
        assert epochs > 0
        assert abs(least - epochs) < 0.01
        assert abs(most - epochs) < 0.01
    for epoch in fleet.audit().epochs:
        assert not epoch.twice
        assert not epoch.missing, epoch.details


def test_one_worker_on_each_of_two_hosts_is_killed_and_replaced_and_a_third_host_joins(
    lab: Netlab, tmp_path: Path
) -> None:
    with Fleet.counting(lab.hosts, tmp_path) as fleet:
        fleet.run(1)
        fleet.wait_for_workers(1)
        fleet.join(1, 1)
        fleet.wait_for_workers(2)
        kill_and_replace(fleet, 1)
        kill_and_replace(fleet, 0)
        fleet.join(2, 1)
        fleet.wait_for_workers(3)
        check_counts(fleet, 3)


def test_two_workers_join_two_and_after_a_kill_on_each_host_a_third_host_joins(lab: Netlab, tmp_path: Path) -> None:
    with Fleet.counting(lab.hosts, tmp_path) as fleet:
        fleet.run(2)
        fleet.wait_for_workers(2)
        fleet.join(1, 2)
        fleet.wait_for_workers(4)
        for host in dict.fromkeys(row.host for row in fleet.workers()):
            kill_and_replace(fleet, next(row.rank for row in fleet.workers() if row.host == host))
        fleet.join(2, 1)
        fleet.wait_for_workers(5)
        check_counts(fleet, 5)
