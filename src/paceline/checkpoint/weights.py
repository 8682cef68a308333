"""The weights of a checkpoint, into a model: for who wants to use what was trained."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from paceline.checkpoint.files import read
from paceline.custody.names import MODEL
from paceline.errors import CheckpointError


def load_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Load the weights of the checkpoint in this folder, such as `runs/NAME/checkpoints/best`. Its checksums are
    compared, and tied weights are loaded under all their names. `CheckpointError` says what cannot be read, or does not
    fit this model."""
    folder = Path(checkpoint)
    if folder.name == MODEL:
        raise CheckpointError(f"{folder} is one file of a checkpoint; give the folder that it is in, {folder.parent}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not the folder of a checkpoint; look for one in runs/NAME/checkpoints")
    contents = read(folder)
    tables = contents.state.get("tables", {}) if isinstance(contents.state, dict) else {}
    if tables:
        raise CheckpointError(
            f"{folder} has tables, {', '.join(map(repr, sorted(tables)))}, whose rows are not weights of it; make "
            "a Session with Checkpoints(folder=..., resume=True), and take them from session.table"
        )
    try:
        model.load_state_dict(contents.model)
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit this model: {error}") from error
