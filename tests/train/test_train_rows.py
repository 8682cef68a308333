"""The rows of steps in run.db outlive the workers that made them."""

from __future__ import annotations

from pathlib import Path

from trainers import BATCH, LENGTH, check_samples, train_and_kill_the_donor

from paceline.testing.rehearsal import Died, Rehearsal
from paceline.watch.audit import audit, history_of

STEPS = -(-LENGTH // BATCH)


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
        with run.reader() as reader:
            rows = reader.steps()
    assert isinstance(results[0], Died)
    num_epochs = results[1]["steps"] // STEPS
    check_samples([results[1]], num_epochs, lost=True)
    found = audit(history_of(rows), LENGTH, BATCH)
    assert not [text for epoch in found.epochs if not epoch.is_exact for text in epoch.details]
    assert len(rows) == results[1]["steps"]
