"""What checkpoints are called on disk, and how they are found and put aside. None of them is opened here."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from paceline.custody.partial import Partial, retire, sync_folder

MODEL, STATE, MANIFEST = "model.safetensors", "state.safetensors", "manifest.json"
FILES = (MODEL, STATE, MANIFEST)
FOLDER = "checkpoints"  # in the run's folder
MAX_OPERATION = 999_999_999
NAME = re.compile(r"step-([0-9]{9})-op-(0|[1-9][0-9]{0,8})")


class FoundCheckpoint(NamedTuple):
    path: Path
    operation: int
    step: int


def path_of(folder: Path, step: int, operation: int) -> Path:
    """By the step for people; by the operation because evaluations and decisions are between two steps."""
    return folder / f"step-{step:09d}-op-{operation}"


def is_possible(step: int, operation: int) -> bool:
    return 0 <= step <= MAX_OPERATION and 0 <= operation <= MAX_OPERATION


def find(folder: Path) -> list[FoundCheckpoint]:
    """The checkpoints of a folder by their names, newest first. None of them is opened."""
    if not folder.is_dir():
        return []
    found = [
        FoundCheckpoint(Path(entry.path), int(named[2]), int(named[1]))
        for entry in os.scandir(folder)
        if (named := NAME.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
    ]
    return sorted(found, key=lambda one: one.operation, reverse=True)


def find_one(folder: Path, operation: int) -> Path:
    """`FileNotFoundError` if there is none."""
    for found in find(folder):
        if found.operation == operation:
            return found.path
    raise FileNotFoundError(f"there is no checkpoint of operation {operation} in {folder}")


def publish(draft: Partial, folder: Path, step: int, operation: int) -> Path:
    """Give a checkpoint its name. Another one of the same operation, from before the run went back, goes."""
    final = path_of(folder, step, operation)
    draft.publish(final)
    for found in find(folder):
        if found.operation == operation and found.path != final:
            retire(found.path)
    return final


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
