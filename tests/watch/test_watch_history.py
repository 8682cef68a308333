"""Which rows count after a rollback, as lists."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from paceline.control.journal.reader import RunReader, StepRecord
from paceline.control.messages.plan import PlanStart
from paceline.watch.history import losses, metrics, standing_steps
from paceline.watch.look import RecentSteps, look_at
from tests.watch.samples import EPOCH, a_whole_run, plan_row, step, writing


def test_losses_and_metrics_are_lists_of_one_length(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        writer.metric("broken", math.nan)
        with RunReader(tmp_path) as reader:
            assert losses(reader).operations == list(range(1, 9))
            assert losses(reader).values == [0.5 / operation for operation in range(1, 9)]
            assert metrics(reader)["accuracy"] == ([4, 8], [0.75, 0.875])
            assert math.isnan(metrics(reader)["broken"].values[0])


def test_what_a_rollback_took_back_does_not_count(tmp_path: Path) -> None:
    with writing(tmp_path, has_clock=True) as writer, RunReader(tmp_path) as reader:
        a_whole_run(writer)
        recent = RecentSteps()
        assert [row.operation for row in recent.update(reader, reader.plans(), 8)] == list(range(1, 9))
        writer.now += 1.0
        writer.plan("cccccccccccccccc", start=PlanStart.FOUND, base=5)
        # The newest founding has no row of its own yet.
        assert losses(reader).operations == [1, 2, 3, 4, 5]
        assert metrics(reader)["accuracy"] == ([4], [0.75])
        assert [row.operation for row in recent.update(reader, reader.plans(), 8)] == [1, 2, 3, 4, 5]
        assert [row.operation for row in RecentSteps().update(reader, reader.plans(), 8)] == [1, 2, 3, 4, 5]
        look = look_at(reader, writer.now)
        assert (look.epoch, look.position, look.step) == (1, 32, 5)
        writer.steps(1, EPOCH[1:3])
        expected = [1, 2, 3, 4, 5, 6, 7]
        assert losses(reader).operations == expected
        assert [row.operation for row in recent.update(reader, reader.plans(), 8)] == expected
        assert [row.operation for row in RecentSteps().update(reader, reader.plans(), 8)] == [6, 7]
        look = look_at(reader, writer.now)
        assert (look.epoch, look.position, look.step) == (1, 96, 7)


def test_foundings_leave_what_they_started_from() -> None:
    rows = [step(1, 0, 4), step(2, 4, 4), step(3, 8, 4, founding=3), step(4, 12, 4, founding=3), step(5, 16, 4)]
    plans = [
        plan_row(1, PlanStart.FOUND, 0, 0),
        plan_row(2, PlanStart.RECOVER, 1, 1),
        plan_row(3, PlanStart.FOUND, 2, 2),
    ]
    assert [row.operation for row in standing_steps(rows, plans)] == [1, 2, 3, 4]
    plans.append(plan_row(4, PlanStart.FOUND, 3, 3))
    assert [row.operation for row in standing_steps(rows, plans)] == [1, 2, 3]


class AskedReader(RunReader):
    """Notes since which operation it is asked for steps."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.asked: list[int] = []

    def steps(self, since: int = -1) -> list[StepRecord]:
        self.asked.append(since)
        return super().steps(since)


def test_only_the_last_steps_of_a_long_run_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.watch.look.KEPT_STEPS", 3)
    with writing(tmp_path) as writer, contextlib.closing(AskedReader(tmp_path)) as reader:
        a_whole_run(writer)
        recent = RecentSteps()
        assert [row.operation for row in recent.update(reader, reader.plans(), 8)] == [6, 7, 8]
        assert [row.operation for row in recent.update(reader, reader.plans(), 8)] == [6, 7, 8]
        assert reader.asked == [5, 8]
