"""Sparse tables in real runs: rows that are pulled ahead, cached, admitted and dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import find
from paceline.nn import Embedding
from paceline.strategy.served_rows import ServedRows
from paceline.testing.rehearsal import Rehearsal
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.server_runs import settings_for
from tests.train.table_trainers import STEPS, Case, alone, check_alike, check_close, train

torch.set_num_threads(1)

AHEAD = Case("hybrid", "adagrad and nadam", epochs=2, prefetches=True)  # one in which a step changes much


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


def count(plan: dict[str, Any]) -> dict[str, Any]:
    """Ids that come once, and one that is in every batch."""
    words = Embedding(plan.get("dim", 2), name="words", **plan.get("options", {}))
    model = nn.Sequential(words, nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [([number, -7], 1.0) for number in range(12)]
    options: dict[str, Any] = {"strategy": plan.get("strategy", "allreduce")}
    if "folder" in plan:
        options["checkpoints"] = Checkpoints(folder=plan["folder"], resume=True)
    session = Session(model, optimizer, data=data, global_batch=2, shuffle=False, **options)

    def loss_fn(ids: list[torch.Tensor], _: torch.Tensor) -> torch.Tensor:
        chosen = torch.stack(ids, 1).to(plan.get("dtype", torch.int64))
        loss: torch.Tensor = model(chosen).sum() * plan.get("factor", 1.0)
        return loss

    with session:
        for epoch in session.epochs(plan.get("epochs", 1)):
            for batch in epoch:
                session.step(loss_fn, batch)
        ids, rows = session.table(words)
        source = session._parts.updater.gradients.sparse.source
        asked = (source.num_asked, source.num_pulled) if isinstance(source, ServedRows) else (0, 0)
    return {"ids": ids.tolist(), "rows": rows.tolist(), "asked": asked, "steps": session.steps}


def test_what_comes_once_gets_no_row_or_loses_it_and_what_comes_often_is_not_asked_for(tmp_path: Path) -> None:
    options = {"admit_after": 1, "cache": 3}
    with Rehearsal(
        count,
        {"strategy": "server", "options": options},
        workers=1,
        folder=tmp_path,
        settings=settings_for(1, 1),
    ) as run:
        (result,) = run.finish()
    assert result["ids"] == [-7], "all others came once"
    assert result["asked"] == (18, 14), "that one is asked for in steps 1 and 5 of 6"
    assert count({"options": {"evict_after": 2}})["ids"] == [-7, 8, 9, 10, 11], "of the last two steps"
    assert count({"options": {"evict_after": 2}, "epochs": 2})["ids"] == [-7, 8, 9, 10, 11]


def test_rows_of_a_checkpoint_are_not_old_where_nobody_counted(tmp_path: Path) -> None:
    """Six steps without `evict_after`, six with it; each id comes every six steps."""
    count({"folder": str(tmp_path)})
    found = count({"folder": str(tmp_path), "options": {"evict_after": 8}, "epochs": 2})
    assert found["rows"] == count({"epochs": 2})["rows"]


def test_a_table_of_another_dim_than_the_checkpoint_is_named_and_nothing_is_lost(tmp_path: Path) -> None:
    folder = str(tmp_path)
    before = count({"folder": folder})
    saved = find(tmp_path)
    with pytest.raises(RuntimeError, match=r"table 'words' has rows of 3 numbers.*rows of 2: make it with dim=2"):
        count({"folder": folder, "dim": 3, "epochs": 2})
    assert find(tmp_path) == saved
    after = count({"folder": folder})
    assert (after["ids"], after["rows"], after["steps"]) == (before["ids"], before["rows"], before["steps"])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"dtype": torch.uint64}, "TypeError: Embedding 'words': ids are torch.uint64; give int64"),
        ({"factor": float("nan")}, "not finite in step 1: the gradient of words on rank 0"),
    ],
    ids=["ids", "nan"],
)
def test_ids_that_are_none_and_gradients_that_are_not_finite_end_a_run_by_name(
    tmp_path: Path, plan: dict[str, Any], message: str
) -> None:
    with Rehearsal(
        count, {"strategy": "server", **plan}, workers=1, folder=tmp_path, settings=settings_for(1, 1)
    ) as run:
        run.exhausted = True
        (result,) = run.finish()
        assert message in result.error
