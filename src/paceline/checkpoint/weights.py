"""The weights of a model by name, and those of a checkpoint into a model.

`torch.compile(model)` is a module around the model, and puts `_orig_mod.` into the names of its weights. Here they have
their names without it, so that what a compiled model has learned is for the plain one too, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from paceline.checkpoint.files import read
from paceline.custody.names import MODEL
from paceline.errors import CheckpointError

_COMPILED = "_orig_mod."
LEFT_OUT = "left_out"  # of the state of a checkpoint: the frozen weights that it lacks, each with a checksum


def plain_name(name: str) -> str:
    """The name of a parameter, buffer or module as if nothing were compiled."""
    return name.replace(_COMPILED, "")


def weights_of(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Its `state_dict` under plain names."""
    return {plain_name(name): value for name, value in model.state_dict(keep_vars=keep_vars).items()}


def load_weights(model: nn.Module, weights: Mapping[str, Any], left_out: Iterable[str] = ()) -> None:
    """The inverse of `weights_of`; raises as `load_state_dict` does. Those that were left out stay as they are."""
    now = model.state_dict()
    own = {plain_name(name): name for name in now}
    kept = {own[name]: now[own[name]] for name in left_out if name in own}
    model.load_state_dict({**kept, **{own.get(name, name): value for name, value in weights.items()}})


def load_model(model: nn.Module, checkpoint: str | Path) -> None:
    """Load the weights of a checkpoint into a model of the same class.

    >>> paceline.load_model(model, "runs/digits/checkpoints/best")

    Its checksums are compared, and tied weights are loaded under all their names. Frozen weights that were
    left out (`Checkpoints(only_trained=True)`) stay as they are in the model. `CheckpointError` says what cannot be
    read, or does not fit this model."""
    folder = Path(checkpoint)
    if folder.name == MODEL:
        raise CheckpointError(f"{folder} is one file of a checkpoint; give the folder that it is in, {folder.parent}")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not the folder of a checkpoint; look for one in runs/NAME/checkpoints")
    contents = read(folder)
    state = contents.state if isinstance(contents.state, dict) else {}
    if tables := state.get("tables"):
        raise CheckpointError(
            f"{folder} has tables, {', '.join(map(repr, sorted(tables)))}, whose rows are not weights of it; make "
            "a Session with Checkpoints(folder=..., resume=True), and take them from session.table"
        )
    try:
        load_weights(model, contents.model, state.get(LEFT_OUT, ()))
    except RuntimeError as error:
        raise CheckpointError(f"the weights of {folder} do not fit this model: {error}") from error
