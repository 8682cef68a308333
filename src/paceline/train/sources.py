"""Where a worker finds the run's checkpoints: in folders of this machine, or at the run's host.

choose(...)     which of the two, asked once, when a checkpoint is first looked for
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from paceline.checkpoint import Contents, newest_good
from paceline.checkpoint.files import Skipped, read
from paceline.checkpoint.stores import CheckpointStore, DistantStore, LocalStore
from paceline.custody import names
from paceline.custody.depot import Depot
from paceline.custody.moving import CustodyError
from paceline.custody.partial import Partial, sweep
from paceline.custody.shelf import RetentionRules
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline.train")

FIRST_S = 30.0  # for the first word of the run's host: as long as a newcomer waits for the coordinator
_LOOKS = 20

Tell = Callable[[str, str], None]


class CheckpointSource(Protocol):
    """Used by the training thread. What cannot be read is a `CheckpointError`, what cannot be had a `CustodyError`."""

    is_near: bool  # whether reading one costs no more than a disk

    def operations(self) -> list[int]:
        """Those of the checkpoints that are there, by their names, newest first."""

    def newest(self, tell: Tell) -> Contents | None:
        """The newest one that is intact; newer ones are put aside and told. If none is, all stay where they are."""

    def damaged(self) -> list[Skipped]:
        """All that are there, with what is wrong with each, if none of them is intact; else none."""

    def read(self, operation: int) -> Contents: ...

    def set_aside(self, operations: Sequence[int]) -> None:
        """They count as checkpoints no more."""

    def store(self, rules: RetentionRules) -> CheckpointStore:
        """Where new ones go."""


def choose(folder: Path, own: Path | None, depot: Depot | None, *, is_given: bool) -> CheckpointSource:
    """`folder` is where this script wants its checkpoints, by its own word if `is_given`; `own` is the folder of the
    run on this machine, where those of other hosts come in, or leave from; `depot` leads to the run's host, where this
    is another one."""
    if depot is None:
        return Local([folder] if own is None or own == folder else [folder, own])
    if not is_given:
        return Distant(depot, folder)
    if _is_shared(folder, depot):
        return Local([folder])
    logger.warning(
        "checkpoints: %s is not the same folder on the run's host; they go into the folder of the run there, and are "
        "found there by --resume",
        folder,
    )
    return Distant(depot, own or folder)


def _is_shared(folder: Path, depot: Depot) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return depot.shares(folder)
    except (OSError, CustodyError) as error:
        logger.warning("checkpoints: cannot tell whether %s is shared with the run's host: %s", folder, error)
        return False


class Local:
    """The first folder is the one that is written into."""

    is_near = True

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def operations(self) -> list[int]:
        return [found.operation for found in self._found()]

    def newest(self, tell: Tell) -> Contents | None:
        """In a run that is going on, the main worker removes old ones meanwhile: then there are newer ones, and this
        looks again."""
        newest, bad = self._look()
        for path, reason in bad if newest is not None else ():
            with contextlib.suppress(FileNotFoundError):
                names.set_aside(path)
                tell("skipped checkpoint", f"{path.name}: {reason}")
        return newest

    def damaged(self) -> list[Skipped]:
        newest, bad = self._look()
        return bad if newest is None else []

    def _look(self) -> tuple[Contents | None, list[Skipped]]:
        """The newest one of all folders that is intact, and which ones are not."""
        found = [self._look_into(folder) for folder in self._folders if folder.is_dir()]
        there = [contents for contents, _ in found if contents is not None]
        newest = max(there, key=lambda contents: contents.operation, default=None)
        return newest, [one for _, skipped in found for one in skipped]

    def _look_into(self, folder: Path) -> tuple[Contents | None, list[Skipped]]:
        contents, bad = None, list[Skipped]()
        for _ in range(_LOOKS):
            contents, skipped = newest_good(folder)
            bad = [one for one in skipped if one.path.exists()]
            if len(bad) == len(skipped):
                break
        return contents, bad

    def read(self, operation: int) -> Contents:
        for found in self._found():
            if found.operation == operation:
                return read(found.path)
        raise CheckpointError(f"there is no checkpoint of operation {operation} in {self._folders[0]}")

    def set_aside(self, operations: Sequence[int]) -> None:
        for found in self._found():
            if found.operation in operations:
                with contextlib.suppress(FileNotFoundError):
                    names.set_aside(found.path)

    def store(self, rules: RetentionRules) -> CheckpointStore:
        return LocalStore(self._folders[0], rules)

    def _found(self) -> list[names.FoundCheckpoint]:
        found = [one for folder in self._folders for one in names.find(folder)]
        return sorted(found, key=lambda one: -one.operation)


class Distant:
    """`staging` is a folder here, for what is on its way."""

    is_near = False

    def __init__(self, depot: Depot, staging: Path) -> None:
        self._depot = depot
        self._staging = staging
        self._known: list[int] | None = None  # as of the last answer

    def operations(self) -> list[int]:
        """Without any answer yet, this waits for one: who takes no answer for no checkpoint would begin the run anew,
        and put aside all that there are. `Unreached` after `FIRST_S`."""
        if self._known is None:
            self._known = self._depot.operations(within_s=FIRST_S)
        else:
            self._known = self._depot.operations_now(self._known)
        return self._known

    def newest(self, tell: Tell) -> Contents | None:
        newest, bad, _ = self._look()
        if newest is not None and bad:
            self.set_aside([operation for operation, _ in bad])
            for operation, reason in bad:
                tell("skipped checkpoint", f"operation {operation}: {reason}")
        return newest

    def damaged(self) -> list[Skipped]:
        newest, bad, is_sure = self._look()
        if newest is not None or not is_sure:
            return []
        return [Skipped(Path(names.FOLDER, f"step-*-op-{operation}"), reason) for operation, reason in bad]

    def _look(self) -> tuple[Contents | None, list[tuple[int, str]], bool]:
        """The newest one that is intact, those that are not, and whether all that were looked at could be had."""
        bad: list[tuple[int, str]] = []
        is_sure = True
        for operation in self._depot.operations():
            try:
                return self.read(operation), bad, is_sure
            except CheckpointError as error:
                bad.append((operation, str(error)))
            except CustodyError as error:
                is_sure = False
                logger.warning("the checkpoint of operation %d was not fetched: %s", operation, error)
        return None, bad, is_sure

    def read(self, operation: int) -> Contents:
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            sweep(self._staging)
            partial = Partial(self._staging)
        except OSError as error:
            raise CustodyError(
                f"{self._staging} cannot be written: {error.strerror or error}; make room there"
            ) from error
        try:
            self._depot.fetch(operation, partial)
            return read(partial.path)
        finally:
            partial.remove()

    def set_aside(self, operations: Sequence[int]) -> None:
        if operations:
            self._depot.set_aside(operations)

    def store(self, rules: RetentionRules) -> CheckpointStore:
        return DistantStore(self._staging, self._depot, rules)
