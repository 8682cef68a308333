"""Schedules of a worker that does only some of the leases stand where those of one process would."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from paceline.train.schedules import Schedules

NUM_LEASES = 6


def new_schedule() -> StepLR:
    return StepLR(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0), 2)


def do(schedules: Schedules, schedule: StepLR, lease: int, settled: int) -> None:
    schedules.move_on(settled)
    schedule.optimizer.step()
    schedule.step()
    schedules.body_ran(lease)


def test_leases_of_others_move_it_on_too() -> None:
    schedule = new_schedule()
    schedules = Schedules([schedule])
    for epoch in (1, 2):
        schedules.begin()
        do(schedules, schedule, 1, settled=0)
        do(schedules, schedule, 4, settled=3)
        schedules.end(NUM_LEASES)
        assert schedule.last_epoch == epoch * NUM_LEASES


def test_what_was_not_known_how_to_do_is_made_up_for() -> None:
    """An epoch in which this worker had no lease: what its body does to a schedule is seen in the next one."""
    schedule = new_schedule()
    schedules = Schedules([schedule])
    schedules.begin()
    schedules.end(NUM_LEASES)
    schedules.begin()
    do(schedules, schedule, 0, settled=0)
    schedules.end(NUM_LEASES)
    assert schedule.last_epoch == 2 * NUM_LEASES


@pytest.mark.parametrize("works_at_once", [True, False])
def test_what_a_received_state_has_is_not_made_up_for_again(works_at_once: bool) -> None:
    schedule = new_schedule()
    schedules = Schedules([schedule])
    schedule.optimizer.step()
    for _ in range(5):  # the state in which it came
        schedule.step()
    schedules.begin(5)
    if works_at_once:
        do(schedules, schedule, 5, settled=5)
    schedules.end(NUM_LEASES)
    schedules.begin()
    do(schedules, schedule, 0, settled=0)
    schedules.end(NUM_LEASES)
    assert schedule.last_epoch == 2 * NUM_LEASES
