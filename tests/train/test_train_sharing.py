"""What a worker measures of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.train import sharing, starvation
from paceline.train.sharing import Stopwatch
from paceline.train.starvation import Starvation


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(sharing, "time", clock)
    monkeypatch.setattr(starvation, "time", clock)
    return clock


def test_a_stopwatch_counts_what_lies_between_two_reductions_but_for_pauses(clock: Clock) -> None:
    watch = Stopwatch()
    assert watch.read() == 0.0, "the first step is not a usual one"
    watch.start()
    clock.now += 2.0
    watch.pause()
    clock.now += 50.0
    watch.resume()
    clock.now += 1.0
    assert watch.read() == 3.0
    watch.resume()
    assert watch.read() == 3.0, "it goes on already"
    watch.start()
    clock.now += 1.0
    assert watch.read() == 1.0


def test_what_a_step_waited_for_others_is_not_its_work(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()
    clock.now += 2.0
    assert watch.read(1.5) == 0.5
    assert watch.read(2.5) == 0.0
    watch.spoil()
    assert watch.read(1.5) == 0.0


def test_a_step_that_was_disturbed_is_not_measured_but_the_next_one_is(clock: Clock) -> None:
    watch = Stopwatch()
    watch.start()
    clock.now += 2.0
    watch.spoil()
    assert watch.read() == 0.0
    watch.start()
    clock.now += 2.0
    assert watch.read() == 2.0
    watch.pause()
    assert watch.read() == 0.0, "who waits is not busy"


def test_starvation_is_the_part_of_the_time_ready_but_not_running(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "schedstat"
    monkeypatch.setattr(starvation, "_SOURCE", source)
    starved = Starvation()
    assert starved.look() == 0.0, "where it cannot be told it is not said"
    source.write_text("5000000000 1000000000 77\n")
    clock.now += 10.0
    starved.look()
    clock.now += 2.0
    source.write_text("5000000000 2500000000 99\n")
    assert starved.look() == pytest.approx(0.75)
    clock.now += 0.5
    source.write_text("5000000000 9000000000 99\n")
    assert starved.look() == pytest.approx(0.75), "looked at once a second"
