"""Jobs of a lane: in order, and a job within a job before what others have queued."""

from __future__ import annotations

import threading

import pytest

from paceline.collective.lane import Handle, Lane


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


@pytest.mark.timeout(20)
def test_a_callback_that_waits_for_its_own_thread_is_told(order: list[str]) -> None:
    lane = Lane("paceline-test")
    begun, told = threading.Event(), threading.Event()

    def wait_for_another(_: Handle) -> None:
        with pytest.raises(RuntimeError, match="second: waited for by the thread that must do it"):
            lane.submit("second", lambda _: order.append("second")).wait()
        order.append("told")
        told.set()

    lane.submit("first", lambda _: order.append(f"first {begun.wait()}")).add_done_callback(wait_for_another)
    begun.set()
    assert told.wait(10.0)
    lane.close()
    assert order == ["first True", "told", "second"]
