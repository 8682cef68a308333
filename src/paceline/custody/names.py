"""What checkpoints are called on disk, and how they are found and put aside. None of them is opened here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from paceline.custody.partial import sync_folder

MODEL, STATE, MANIFEST = "model.safetensors", "state.safetensors", "manifest.json"
FILES = (MODEL, STATE, MANIFEST)
FOLDER = "checkpoints"  # in the run's folder
MAX_OPERATION = 999_999_999
NAME = re.compile(r"step-([0-9]{9})")


class FoundCheckpoint(NamedTuple):
    path: Path
    operation: int


def path_of(folder: Path, operation: int) -> Path:
    return folder / f"step-{operation:09d}"


def find(folder: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a folder by their names, newest first. None of them is opened."""
    if not folder.is_dir():
        return []
    found = [
        FoundCheckpoint(Path(entry.path), int(named[1]))
        for entry in os.scandir(folder)
        if (named := NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, key=lambda one: one.operation, reverse=True)


def set_aside(path: Path) -> Path:
    """Rename a checkpoint that cannot be read, so that it no longer counts as one; returns where it is now."""
    base = aside = path.with_name(f"corrupt-{path.name}")
    count = 1
    while aside.exists():
        count += 1
        aside = base.with_name(f"{base.name}-{count}")
    os.rename(path, aside)
    sync_folder(path.parent)
    return aside
