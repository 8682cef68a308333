"""Where a keeper's checkpoints go: into a folder of this machine, or to the run's host.

A store is called by the keeper's thread only. `write` has everything there, synced, under no name; `publish` gives it
its name; `between` is called between pieces, and what it raises ends the call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from paceline.checkpoint import files
from paceline.custody import names
from paceline.custody.custodian import Tidying
from paceline.custody.depot import Depot, Held, OnDisk
from paceline.custody.moving import CustodyError
from paceline.custody.partial import Partial, sweep
from paceline.custody.shelf import RetentionRules, Shelf
from paceline.errors import CheckpointError

_log = logging.getLogger(__name__)

Between = Callable[[], None]


class Draft(Protocol):
    """A checkpoint without a name."""

    def remove(self) -> None: ...


class CheckpointStore(Protocol):
    def path_of(self, step: int, operation: int) -> Path:
        """Where a checkpoint is, or would be; for people."""

    def has(self, operation: int) -> bool:
        """Whether it may be there, as far as is known without waiting."""

    def write(self, prepared: files.Prepared, between: Between) -> Draft: ...

    def publish(self, draft: Draft, step: int, operation: int, between: Between) -> None: ...

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        """Keep what the rules say; what was removed."""

    def close(self) -> None: ...


class LocalStore:
    def __init__(self, folder: Path, rules: RetentionRules) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._shelf = Shelf(folder, rules)
            sweep(folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep checkpoints in {folder}: {error.strerror or error}; give a folder that can be written"
            ) from error

    def path_of(self, step: int, operation: int) -> Path:
        return names.path_of(self._folder, step, operation)

    def has(self, operation: int) -> bool:
        return any(found.operation == operation for found in names.find(self._folder))

    def write(self, prepared: files.Prepared, between: Between) -> Partial:
        return files.write_partial(self._folder, prepared, between)

    def publish(self, draft: Draft, step: int, operation: int, between: Between) -> None:
        assert isinstance(draft, Partial)
        files.publish(draft, self._folder, step, operation)

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        return self._shelf.tidy(scores, published=published)

    def close(self) -> None:
        """Nothing is held."""


class _Sent:
    """What the run's host has of a checkpoint, and the files here if there was room for them."""

    def __init__(self, partial: Partial | None, held: Held) -> None:
        self.partial = partial
        self.held = held

    def remove(self) -> None:
        self.held.close()
        self.remove_files()

    def remove_files(self) -> None:
        if self.partial is not None:
            self.partial.remove()


class DistantStore:
    """Checkpoints of a worker on another host. They are written into a partial folder here, sent from there, and
    removed here when the run's host has published them: what was sent can be sent again until then, and a slow link
    holds up nothing but the next checkpoint. Where they cannot be written here, they are sent as they are in memory:
    the disk of this host must not keep them from the run's."""

    def __init__(self, staging: Path, depot: Depot, rules: RetentionRules) -> None:
        self._local: LocalStore | None = None
        self._staging = staging
        self._depot = depot
        self._rules = rules
        self._published: set[int] = set()
        self._has_warned = False

    def path_of(self, step: int, operation: int) -> Path:
        return names.path_of(Path(names.FOLDER), step, operation)

    def has(self, operation: int) -> bool:
        return operation in self._published

    def write(self, prepared: files.Prepared, between: Between) -> _Sent:
        partial = self._write_here(prepared, between)
        try:
            sent = files.InMemory(prepared, between) if partial is None else OnDisk(partial.path)
            contents = prepared.contents
            return _Sent(partial, self._depot.hold(sent, contents.step, contents.operation, between))
        except BaseException as error:
            if partial is not None:
                partial.remove()
            if isinstance(error, CustodyError):
                raise CheckpointError(str(error)) from error
            raise

    def _write_here(self, prepared: files.Prepared, between: Between) -> Partial | None:
        """None, with a warning, if it cannot be done."""
        try:
            if self._local is None:
                self._local = LocalStore(self._staging, self._rules)
            partial = self._local.write(prepared, between)
        except CheckpointError as error:
            if not self._has_warned:
                _log.warning("checkpoints are sent to the run's host without a copy here: %s", error)
            self._has_warned = True
            return None
        self._has_warned = False
        return partial

    def publish(self, draft: Draft, step: int, operation: int, between: Between) -> None:
        assert isinstance(draft, _Sent)
        try:
            draft.held.publish(between)
        except CustodyError as error:
            draft.remove()
            raise CheckpointError(str(error)) from error
        self._published.add(operation)
        draft.remove_files()

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        rules = self._rules
        asked = Tidying(rules.keep_last, rules.keep_best, dict(scores), published)
        removed = [Path(name) for name in self._depot.tidy(asked)]
        self._published -= {int(named[2]) for path in removed if (named := names.NAME.fullmatch(path.name))}
        return removed

    def close(self) -> None:
        self._depot.close()
