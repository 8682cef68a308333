"""A folder that a script names for its checkpoints belongs to one training at a time.

Checkpoints are told apart by the number of their operation. Those of two trainings in one folder would be taken for one
history: the newer training would go on from the older one's, or have its own removed as the oldest. So a training
writes into the folder whose it is, and another that would begin there is refused, unless it was told to resume.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from paceline.custody import names
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline.train")

OWNER = ".training"  # holds the id of the training that the folder's checkpoints are of


class FolderClaim:
    """`training` is the same for all workers of a run, and for those that are started again; another one after
    `--resume`. `resumes` says that whatever is in the folder may be gone on with."""

    def __init__(self, folder: Path, training: str, *, resumes: bool) -> None:
        self._folder = folder
        self._training = training
        self._resumes = resumes
        self._is_taken = False

    def take(self) -> None:
        """Before anything in the folder is looked at. `CheckpointError` if it holds another training's checkpoints."""
        if self._is_taken:
            return
        found = names.find(self._folder)
        if found and self._owner() != self._training and not self._resumes:
            raise CheckpointError(
                f"{self._folder} holds checkpoints of an earlier training, up to operation {found[0].operation}; go on "
                "with it (Checkpoints(resume=True), or paceline run --resume), or give another folder"
            )
        self._is_taken = True
        self._note()

    def check(self) -> None:
        """Before a checkpoint is written. `CheckpointError` if another training has taken the folder since."""
        owner = self._owner()
        if not owner:  # there was no room for it, and workers that are started again look for it
            self._note()
        elif owner != self._training:
            raise CheckpointError(
                f"another training writes its checkpoints into {self._folder}, too; give each a folder of its own"
            )

    def _note(self) -> None:
        partial = self._folder / f"{OWNER}-{os.getpid()}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            partial.write_text(self._training)
            partial.replace(self._folder / OWNER)
        except OSError as error:  # a checkpoint is refused for the same reason, and told then
            logger.warning("cannot note in %s whose checkpoints it holds: %s", self._folder, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)

    def _owner(self) -> str:
        try:
            return (self._folder / OWNER).read_text()
        except OSError:
            return ""
