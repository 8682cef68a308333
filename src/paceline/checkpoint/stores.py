"""Where a keeper's checkpoints go: into a folder of this machine, or to the run's host.

A store is called by the keeper's thread only. `write` has everything there, synced, under no name; `publish` gives it
its name; `between` is called between pieces, and what it raises ends the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from paceline.checkpoint import files
from paceline.checkpoint.errors import CheckpointError
from paceline.custody import names
from paceline.custody.custodian import Tidying
from paceline.custody.depot import Depot, Held
from paceline.custody.moving import CustodyError
from paceline.custody.partial import Partial, sweep
from paceline.custody.shelf import Rules, Shelf

Between = Callable[[], None]


class Draft(Protocol):
    """A checkpoint without a name."""

    def remove(self) -> None: ...


class Store(Protocol):
    def path_of(self, operation: int) -> Path:
        """Where a checkpoint is, or would be; for people."""

    def has(self, operation: int) -> bool:
        """Whether it may be there, as far as is known without waiting."""

    def write(self, prepared: files.Prepared, between: Between) -> Draft: ...

    def publish(self, draft: Draft, operation: int, between: Between) -> None: ...

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        """Keep what the rules say; what was removed."""

    def close(self) -> None: ...


class LocalStore:
    def __init__(self, folder: Path, rules: Rules) -> None:
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._shelf = Shelf(folder, rules)
            sweep(folder)
        except OSError as error:
            raise CheckpointError(
                f"cannot keep checkpoints in {folder}: {error.strerror or error}; give a folder that can be written"
            ) from error

    def path_of(self, operation: int) -> Path:
        return names.path_of(self._folder, operation)

    def has(self, operation: int) -> bool:
        return self.path_of(operation).is_dir()

    def write(self, prepared: files.Prepared, between: Between) -> Partial:
        return files.write_partial(self._folder, prepared, between)

    def publish(self, draft: Draft, operation: int, between: Between) -> None:
        assert isinstance(draft, Partial)
        files.publish(draft, self._folder, operation)

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        return self._shelf.tidy(scores, published=published)

    def close(self) -> None:
        """Nothing is held."""


class _Sent:
    """The files here, and what the run's host has of them."""

    def __init__(self, partial: Partial, held: Held) -> None:
        self.partial = partial
        self.held = held

    def remove(self) -> None:
        self.held.close()
        self.partial.remove()


class DistantStore:
    """Checkpoints of a worker on another host. They are written into a partial folder here, sent from there, and
    removed here when the run's host has published them: what was sent can be sent again until then, and a slow link
    holds up nothing but the next checkpoint."""

    def __init__(self, staging: Path, depot: Depot, rules: Rules) -> None:
        self._local = LocalStore(staging, rules)
        self._staging = staging
        self._depot = depot
        self._rules = rules
        self._published: set[int] = set()

    def path_of(self, operation: int) -> Path:
        return names.path_of(Path(names.FOLDER), operation)

    def has(self, operation: int) -> bool:
        return operation in self._published

    def write(self, prepared: files.Prepared, between: Between) -> _Sent:
        partial = self._local.write(prepared, between)
        try:
            return _Sent(partial, self._depot.hold(partial.path, prepared.contents.operation, between))
        except BaseException as error:
            partial.remove()
            if isinstance(error, CustodyError):
                raise CheckpointError(str(error)) from error
            raise

    def publish(self, draft: Draft, operation: int, between: Between) -> None:
        assert isinstance(draft, _Sent)
        try:
            draft.held.publish(between)
        except CustodyError as error:
            draft.remove()
            raise CheckpointError(str(error)) from error
        self._published.add(operation)
        draft.partial.remove()

    def tidy(self, scores: Mapping[int, float], published: int | None) -> list[Path]:
        rules = self._rules
        asked = Tidying(rules.keep_last, rules.keep_best, rules.mode, dict(scores), published)
        removed = [Path(name) for name in self._depot.tidy(asked)]
        self._published -= {int(named[1]) for path in removed if (named := names.NAME.fullmatch(path.name))}
        return removed

    def close(self) -> None:
        self._depot.close()
