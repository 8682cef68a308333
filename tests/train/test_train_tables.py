"""Sparse tables in real runs: rows that are pulled ahead, cached, admitted and dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from table_trainers import STEPS, Case, alone, check_alike, check_close, train
from test_train_servers import settings_for

from paceline.testing.rehearsal import Rehearsal

torch.set_num_threads(1)

AHEAD = Case("hybrid", "momentum", epochs=2, prefetches=True)


@pytest.mark.parametrize(
    "case",
    [
        AHEAD._replace(clip_norm=0.5, micro_batch=3, bad_step=4, is_far=True),
        AHEAD._replace(strategy="server", optimizer="adamw", loader_workers=1),
    ],
    ids=lambda case: case.strategy,
)
def test_rows_that_are_pulled_ahead_leave_the_training_that_of_one_process(tmp_path: Path, case: Case) -> None:
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        results = run.finish()
    check_alike(results)
    check_close(results[0], alone(case))
    if not case.loader_workers:  # else they may not have been loaded in time
        assert min(result["taken"] for result in results) >= STEPS, "most batches have one before them"
