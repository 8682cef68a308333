"""What ranges cost: by the bytes that requests touch of them, a window at a time."""

from __future__ import annotations

import pytest
import torch

from paceline.server.messages import CommitStep, Load, StageStep
from paceline.server.metering import FEWEST, LONGEST_S, WINDOW_S, Meter, touched_bytes
from paceline.server.parcels import Detail, Parcel, Partitions, Slice, TableRows

PARTITIONS = Partitions(2, 4)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def dense(*lengths: int) -> Parcel:
    """A gradient for each range."""
    slices = tuple(Slice(number, number, 0, length) for number, length in enumerate(lengths))
    return Parcel(Detail(dense=slices), [torch.zeros(length) for length in lengths])


def full_window(clock: Clock, meter: Meter) -> None:
    for _ in range(FEWEST):
        meter.add(0.0, (), Parcel(), None)
    clock.now += WINDOW_S


def test_time_is_shared_out_by_bytes(clock: Clock) -> None:
    meter = Meter(clock, part=1.0)
    meter.add(0.4, (0, 1), dense(30, 10), None)
    meter.add(0.1, (1,), dense(30, 10), None)
    full_window(clock, meter)
    found = meter.look()
    assert found.number == 1
    assert found.busy == pytest.approx(0.5)
    assert found.costs == pytest.approx({0: 0.3, 1: 0.2})


def test_a_window_needs_time_and_requests(clock: Clock) -> None:
    meter = Meter(clock, part=1.0)
    meter.add(0.5, (0,), dense(1), None)
    clock.now += WINDOW_S
    assert meter.look().number == 0
    clock.now += LONGEST_S - WINDOW_S
    assert meter.look().costs == pytest.approx({0: 0.5 / LONGEST_S})
    for _ in range(FEWEST):
        meter.add(0.0, (0,), dense(1), None)
    assert meter.look().number == 1
    clock.now += WINDOW_S
    assert meter.look()[:2] == (2, 0.0)
    assert meter.look().number == 2, "once"


def test_the_time_of_a_commit_goes_to_what_was_staged(clock: Clock) -> None:
    meter = Meter(clock, part=1.0)
    meter.add(0.0, (0, 1), dense(10, 30), None, push=StageStep(1, 1, 0))
    meter.add(0.0, (0, 1), dense(10, 0), None, push=StageStep(1, 1, 1))
    commit = CommitStep(1, 1, 2, 1.0)
    meter.add(0.5, (0, 1), Parcel(), None, commit=commit)
    wanting = Parcel(Detail(wants=(Slice(0, 0, 0, 5),)), [], [torch.zeros(5)])
    meter.add(0.1, (0, 1), wanting, None, commit=commit)
    full_window(clock, meter)
    assert meter.look().costs == pytest.approx({0: 0.2 + 0.1, 1: 0.3})


def test_what_is_loaded_or_moved_makes_busy_and_is_no_cost(clock: Clock) -> None:
    meter = Meter(clock, part=1.0)
    meter.add(0.2, (0,), dense(5), None, push=Load(1))
    meter.add_other(0.3)
    full_window(clock, meter)
    found = meter.look()
    assert found.busy == pytest.approx(0.5)
    assert found.costs == {}


def test_rows_count_for_the_ranges_of_their_ids() -> None:
    ids = torch.arange(1000)
    parcel = Parcel(
        Detail(rows=(TableRows("t", 0, 1),), row_wants=(TableRows("t", 0, 0),)),
        [ids, torch.zeros(1000, 4)],
        [torch.zeros(1000, 2)],
    )
    counts = torch.bincount(PARTITIONS.of(ids) - 2, minlength=4).tolist()
    found = touched_bytes(range(6), parcel, PARTITIONS)
    assert found == {2 + offset: count * 24 for offset, count in enumerate(counts)}
    assert touched_bytes((3,), parcel, PARTITIONS).keys() == {3}
    assert touched_bytes((0, 1), parcel, PARTITIONS) == {}
    assert touched_bytes(range(6), parcel, None) == {}, "a server that has no table yet"


def test_of_many_ids_some_tell_of_all() -> None:
    ids = torch.arange(100_000)
    parcel = Parcel(Detail(rows=(TableRows("t", 0, 1),)), [ids, torch.zeros(100_000, 1)])
    found = touched_bytes(range(6), parcel, PARTITIONS)
    assert sum(found.values()) == pytest.approx(400_000, rel=0.01)
    assert max(found.values()) < 1.2 * min(found.values())


def test_a_replica_is_not_sent_what_is_wanted() -> None:
    detail = Detail(wants=(Slice(0, 0, 0, 5),), row_wants=(TableRows("t", 0, 0),))
    assert touched_bytes((0, 2), Parcel(detail, [torch.arange(3)]), PARTITIONS) == {}


def test_the_time_of_requests_that_were_not_looked_into_is_shared_out_as_that_of_the_others(clock: Clock) -> None:
    meter = Meter(clock)
    for _ in range(400):
        meter.add(0.001, (0, 1), dense(30, 10), None)
    clock.now += WINDOW_S
    assert meter.look().costs == pytest.approx({0: 0.3, 1: 0.1})
