"""Real processes join, leave and die; nobody else is restarted, no sample is lost or repeated."""

from __future__ import annotations

from pathlib import Path

from paceline.testing.rehearsal import Died, Rehearsal
from tests.train.trainers import BATCH, LENGTH, check_alike, check_samples, train

STEPS = -(-LENGTH // BATCH)


def test_three_workers_train_one_model(tmp_path: Path) -> None:
    with Rehearsal(train, 2, 0.0, workers=3, folder=tmp_path) as run:
        results = run.finish()
    check_alike(results)
    check_samples(results, 2)
    assert results[0]["steps"] == 2 * STEPS == results[0]["bodies"]


def test_a_killed_worker_is_not_missed(tmp_path: Path) -> None:
    with Rehearsal(train, 3, workers=3, folder=tmp_path) as run:
        run.wait_said(0, 5)
        run.kill(1)
        results = run.finish()
        assert isinstance(results[1], Died)
        pids = [worker.pid for worker in run.workers]
    survivors = [results[0], results[2]]
    assert [survivors[0]["pid"], survivors[1]["pid"]] == [pids[0], pids[2]]
    check_alike(survivors)
    check_samples(survivors, 3, lost=True)
    assert survivors[0]["bodies"] == 3 * STEPS


def test_a_worker_joins(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(train, 0, 0.01, str(enough), workers=2, folder=tmp_path) as run:
        run.wait_said(0, 3)
        run.add()
        run.wait_said(2, 5)
        enough.touch()
        results = run.finish()
    check_alike(results)
    check_samples(results, results[0]["steps"] // STEPS)
    assert len(results[2]["committed"]) > 0
