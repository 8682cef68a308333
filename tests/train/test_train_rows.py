"""The rows of steps in run.db outlive the workers that made them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.testing.rehearsal import Died, Rehearsal
from paceline.watch.audit import audit, history_of
from tests.train.trainers import (
    BATCH,
    LENGTH,
    check_samples,
    train,
    train_and_kill_the_donor,
    train_unheard_until_a_checkpoint,
)

STEPS = -(-LENGTH // BATCH)


def check_rows(run: Rehearsal, result: dict[str, Any]) -> None:
    """A row for each step, each sample once an epoch."""
    with run.reader() as reader:
        rows = reader.steps()
    found = audit(history_of(rows), LENGTH, BATCH)
    assert not [text for epoch in found.epochs if not epoch.is_exact for text in epoch.details]
    assert len(rows) == result["steps"]
    check_samples([result], result["steps"] // STEPS, lost=True)


def test_rows_outlive_a_main_worker_that_is_killed_just_after_a_join(tmp_path: Path) -> None:
    """The newcomer is the only one that is left: what was not recorded yet, it must have got with the state."""
    enough = tmp_path / "enough"
    arguments = (str(tmp_path / "founder"), 0, 0.002, str(enough))
    with Rehearsal(train_and_kill_the_donor, *arguments, workers=1, folder=tmp_path) as run:
        run.wait_said(0, 20)
        run.add()
        run.wait_said(1, 20)
        enough.touch()
        results = run.finish()
        assert isinstance(results[0], Died)
        check_rows(run, results[1])


def test_rows_outlive_main_workers_that_are_killed_at_any_time(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(train, 0, 0.002, str(enough), workers=3, folder=tmp_path) as run:
        living = {0, 1, 2}
        while len(living) > 1:
            for number in living:
                run.wait_said(number, len(run.said(number)) + 15)
            main = next(number for number in run.members() if number in living)
            run.kill(main)
            living.remove(main)
        enough.touch()
        results = run.finish()
        (left,) = [result for result in results if not isinstance(result, Died)]
        check_rows(run, left)


def test_rows_outlive_all_workers_as_far_as_the_checkpoint_goes(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "founder"), 4, 0.002)
    with Rehearsal(train_unheard_until_a_checkpoint, *arguments, workers=1, folder=tmp_path) as run:
        run.wait_for(lambda: run.workers[0].exit_code is not None)
        run.add()
        results = run.finish()
        assert isinstance(results[0], Died)
        assert run.events("rollback") + run.events("resumed")
        check_rows(run, results[1])
