"""Jobs of a lane: in order, and a job within a job before what others have queued."""

from __future__ import annotations

import threading

import pytest

from paceline.collective.lane import Lane


@pytest.fixture
def order() -> list[str]:
    return []


@pytest.mark.timeout(20)
def test_a_job_within_a_job_does_not_wait_for_what_another_thread_queued_meanwhile(order: list[str]) -> None:
    lane = Lane("paceline-test")

    def outer(_: bool) -> None:
        queued = threading.Thread(target=lambda: lane.submit("other", lambda _: order.append("other")))
        queued.start()
        queued.join()
        lane.run("inner", lambda _: order.append("inner"))
        order.append("outer")

    lane.run("outer", outer)
    lane.close()
    assert order == ["inner", "outer", "other"]


@pytest.mark.timeout(20)
def test_only_a_caller_that_waits_may_spin(order: list[str]) -> None:
    lane = Lane("paceline-test")
    lane.run("waiting", lambda spins: order.append(f"waiting {spins}"))
    lane.submit("queued", lambda _: lane.run("inside", lambda spins: order.append(f"inside {spins}"))).wait()
    lane.close()
    assert order == ["waiting True", "inside False"]
