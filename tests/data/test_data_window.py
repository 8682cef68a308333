"""Which works are requested ahead, decided without any process."""

from __future__ import annotations

import numpy as np

from paceline.data.window import BatchSpec, LoaderRequest, PrefetchWindow
from tests.data.samples import after, works


def test_requests_go_out_in_order_then_idle() -> None:
    plan = works(0, 0, [[0], [1], [2]])
    window = PrefetchWindow(depth=4)
    window.turn_to(plan[0])
    requests = [window.next_request(after(plan, 0)) for _ in range(5)]
    assert [request.work for request in requests] == [*plan, None, None]
    assert [request.serial for request in requests] == [0, 1, 2, 3, 4]


def test_what_was_requested_is_not_requested_again() -> None:
    plan = works(0, 0, [[k] for k in range(9)])
    window = PrefetchWindow(depth=2)
    requested: list[LoaderRequest] = []
    for position, work in enumerate(plan):
        window.turn_to(work)
        assert window.wanted == (position if position else None)
        while len(requested) < min(position + 3, 9):
            requested.append(window.next_request(after(plan, position)))
        window.finish()
    assert [request.work for request in requested] == plan


def test_after_a_change_of_plan_the_wanted_work_goes_out_next_and_all_before_is_stale() -> None:
    old, new = works(0, 0, [[k] for k in range(9)]), works(1, 0, [[10 * k] for k in range(9)])
    window = PrefetchWindow(depth=4)
    window.turn_to(old[0])
    sent = [window.next_request(after(old, 0)) for _ in range(5)]
    window.finish()
    window.turn_to(new[1])
    assert window.horizon() == sent[-1].serial + 1
    request = window.next_request(after(new, 1))
    assert request.work is new[1]
    assert window.wanted == request.serial == window.horizon()


def test_steps_that_were_passed_over_are_stale_but_later_ones_stay() -> None:
    plan = works(0, 0, [[k] for k in range(9)])
    window = PrefetchWindow(depth=4)
    window.turn_to(plan[0])
    for _ in range(5):
        window.next_request(after(plan, 0))
    window.finish()
    window.turn_to(plan[3])
    assert window.wanted == window.horizon() == 3
    assert window.next_request(after(plan, 3)).work is plan[5]


def test_works_without_samples_are_never_requested() -> None:
    plan = works(0, 0, [[0], [], [], [3]])
    window = PrefetchWindow(depth=4)
    window.turn_to(plan[0])
    assert [window.next_request(after(plan, 0)).work for _ in range(3)] == [plan[0], plan[3], None]


def test_the_look_ahead_over_works_without_samples_is_bounded() -> None:
    asked = []

    def following(k: int) -> BatchSpec:
        asked.append(k)
        return BatchSpec((0, k), 0, ())

    window = PrefetchWindow(depth=4)
    window.turn_to(BatchSpec((0, 0), 0, (1,)))
    for _ in range(5):
        window.next_request(following)
    assert asked == [1, 2, 3, 4]


def test_works_are_told_apart_by_their_content() -> None:
    work = BatchSpec((1, 2), 3, (4, 5))
    assert work.same_as(BatchSpec((1, 2), 3, np.array([4, 5])))
    for other in (
        BatchSpec((1, 1), 3, (4, 5)),
        BatchSpec((1, 2), 4, (4, 5)),
        BatchSpec((1, 2), 3, (4, 6)),
        BatchSpec((1, 2), 3, (4,)),
    ):
        assert not work.same_as(other)
