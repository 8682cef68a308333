"""Hosts that cannot reach each other, but both reach the coordinator: one of them has to go, and comes back when the
path is there again. Nothing is lost, and nobody stands still for long."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.common.fleet import Fleet
from paceline.control.machines.surveys import UNREACHABLE
from paceline.control.messages.plan import Phase
from paceline.testing import netlab
from paceline.testing.netlab import Host, Netlab

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or ""),
]


@pytest.fixture
def lab() -> Iterator[Netlab]:
    with Netlab(3) as lab:
        yield lab


@contextlib.contextmanager
def blocked(*pairs: tuple[Host, Host]) -> Iterator[None]:
    for sender, receiver in pairs:
        sender.lose(receiver)
    try:
        yield
    finally:
        for sender, receiver in pairs:
            sender.find(receiver)


def wait_for_eviction(fleet: Fleet) -> None:
    """One of three workers goes for the right reason; the two others are the same processes as before and train on."""
    before = {row.pid for row in fleet.workers()}
    assert len(before) == 3

    def reasons() -> list[str]:
        with fleet.reader() as reader:
            return [row.reason for row in reader.members() if row.pid in before and row.fate == "evicted"]

    (reason,) = fleet.wait_for(reasons, "an eviction")
    assert reason.startswith(UNREACHABLE)
    left = fleet.wait_for_workers(2)
    assert {row.pid for row in left} < before
    done = {row.pid: len(fleet.steps_of(row.pid)) for row in left}
    fleet.wait_for(lambda: all(len(fleet.steps_of(pid)) > count for pid, count in done.items()), "further steps")


def wait_for_candidate(fleet: Fleet) -> None:
    """A new process of the host that was let go is ready for a seat."""

    def is_ready() -> bool:
        with fleet.reader() as reader:
            waiting = [row for row in reader.members() if row.rank < 0 and not row.fate]
        return any(row.phase == Phase.READY.value for row in waiting)

    fleet.wait_for(is_ready, "a candidate for the seat")


def num_plans(fleet: Fleet) -> int:
    with fleet.reader() as reader:
        return len(reader.plans())


def test_two_hosts_that_cannot_reach_each_other_cost_one_of_them_until_they_can(lab: Netlab, tmp_path: Path) -> None:
    _, one, other = lab.hosts
    with Fleet.counting(lab.hosts, tmp_path) as fleet:
        fleet.run(1)
        fleet.wait_for_workers(1)
        fleet.join(1, 1, "--restarts", "9")
        fleet.join(2, 1, "--restarts", "9")
        fleet.wait_for_workers(3)
        with blocked((one, other)):  # one direction is enough
            wait_for_eviction(fleet)
            wait_for_candidate(fleet)
            plans = num_plans(fleet)
            done = {row.pid: len(fleet.steps_of(row.pid)) for row in fleet.workers()}
            fleet.wait_for(
                lambda: all(len(fleet.steps_of(pid)) > count + 100 for pid, count in done.items()), "a hundred steps"
            )
            assert num_plans(fleet) == plans, "who cannot reach all must not get a seat"
        fleet.wait_for_workers(3)
        with blocked((one, other), (other, one)):
            wait_for_eviction(fleet)
            fleet.finish()
    for least, most, epochs in fleet.counts():
        assert epochs > 0
        assert abs(least - epochs) < 0.01
        assert abs(most - epochs) < 0.01
