"""What a worker does about checkpoints that cannot be written, or cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint import Contents, find, write
from paceline.errors import CorruptCheckpoint
from paceline.testing import faults
from paceline.train import saving
from paceline.train.saving import Checkpoints
from paceline.train.session import Session


def contents_of(operation: int) -> Contents:
    model = {"weight": torch.full((3,), float(operation))}
    return Contents(
        run="r", step=operation, operation=operation, epoch=0, position=operation, model=model, state={}, plan={}
    )


def checkpoint_of(folder: Path, operation: int) -> None:
    write(folder, contents_of(operation))


def test_a_last_state_that_is_in_no_checkpoint_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk: everybody else has waited long enough, and the run ends."""
    checkpoint_of(tmp_path, 3)
    saver = saving.Saver(Checkpoints(), tmp_path, lambda *_: None)
    monkeypatch.setattr(saving, "WRITING_S", 0.0)
    assert saver.unsaved() == ""
    with faults.full_disk(tmp_path, 7):
        saver.take(contents_of(6), wait=True)
        saver.publish(6)
        assert saver._keeper is not None
        saver._keeper.close(wait_s=0.0)
    said = saver.unsaved()
    assert said.startswith("the state after operation 6, the last one, is in no checkpoint: no room for a checkpoint")
    assert " and 7 are free" in said
    assert said.endswith("; the newest checkpoint is that of operation 3")


def test_a_last_state_that_is_published_when_the_worker_closes_is_saved(tmp_path: Path) -> None:
    saver = saving.Saver(Checkpoints(), tmp_path, lambda *_: None)
    saver.take(contents_of(6), wait=True)
    saver.settle(6)
    saver.close()
    assert saver.unsaved() == ""
    assert [found.operation for found in find(tmp_path)] == [6]


def damage(folder: Path, operation: int) -> None:
    file = folder / f"step-{operation:09d}-op-{operation}" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")


def trained(folder: Path, epochs: int) -> Session:
    """A training of one worker, which goes on where the folder has a checkpoint."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    data = [(torch.ones(3), torch.zeros(1)) for _ in range(8)]
    settings = Checkpoints(folder=folder, every_s=None, every_steps=1, resume=True)
    session = Session(model, torch.optim.SGD(model.parameters(), 0.1), data=data, global_batch=4, checkpoints=settings)
    with session:
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(lambda x, y: (model(x) - y).pow(2).mean(), batch)
    return session


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    there = [found.operation for found in find(tmp_path)]
    for operation in there:
        damage(tmp_path, operation)
    for _ in range(2):  # also not when it is tried again
        with pytest.raises(CorruptCheckpoint, match="none of the run's checkpoints can be read") as caught:
            trained(tmp_path, 2)
        assert all(
            f"step-{operation:09d}-op-{operation}/model.safetensors: its checksum" in str(caught.value)
            for operation in there
        )
        assert "begins anew" in str(caught.value)
    assert [found.operation for found in find(tmp_path)] == there
    for found in find(tmp_path):
        found.path.rename(tmp_path / f"mine-{found.operation}")
    assert trained(tmp_path, 2).steps == 4


def test_damaged_checkpoints_are_put_aside_for_an_older_one_and_the_log_says_so(tmp_path: Path) -> None:
    trained(tmp_path, 1)
    newest, *older = [found.operation for found in find(tmp_path)]
    damage(tmp_path, newest)
    session = trained(tmp_path, 1)
    assert session.steps == 2
    progress = session._run.joined.client.progress.take(True)
    assert progress is not None
    told = [remark.text for remark in progress.lines if "put aside" in remark.text]
    assert len(told) == 1
    assert told[0].startswith(f"unreadable, put aside: step-{newest:09d}-op-{newest}: ")
    assert "checksum" in told[0]
    assert (tmp_path / f"corrupt-step-{newest:09d}-op-{newest}").exists()
    assert older[0] in [found.operation for found in find(tmp_path)]


def test_the_last_checkpoint_that_is_left_is_not_put_aside(tmp_path: Path) -> None:
    """It was intact when this worker looked, or another worker did."""
    checkpoint_of(tmp_path, 3)
    saver = saving.Saver(Checkpoints(), tmp_path, lambda *_: None)
    damage(tmp_path, 3)
    with pytest.raises(CorruptCheckpoint, match=r"cannot go on: .*step-000000003-op-3"):
        saver.read(3)
    assert saver.newest_name() == 3
