"""When checkpoints are taken, and by whom: the main worker, at a clean point, published when the step is settled."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from paceline.checkpoint import CheckpointError, Contents, Keeper, newest_good
from paceline.checkpoint.files import find, path_of, read, set_aside
from paceline.checkpoint.pending import Pending
from paceline.control.messages import NOTHING
from paceline.train.errors import Evicted

WRITING_S = 300.0
_LOOKS = 20


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where and how often. `folder` is by default the run's; alone there is none unless given. The newest one is
    started from where `resume` says so, or when the run has lost all of its workers."""

    folder: str | Path | None = None
    every_s: float | None = 60.0
    every_steps: int | None = None
    keep_last: int = 3
    keep_best: int = 1
    mode: Literal["min", "max"] = "min"
    resume: bool = False

    def __post_init__(self) -> None:
        if self.every_s is not None and self.every_s < 0:
            raise ValueError(f"every_s={self.every_s}: give seconds, or None")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}: give 1 or more, or None")


class Saver:
    """A keeper that is made when this worker is main for the first time."""

    def __init__(self, settings: Checkpoints, folder: Path | None, on_event: Callable[[str, str], None]) -> None:
        self._settings = settings
        self._folder = folder
        self._on_event = on_event
        self._keeper: Keeper | None = None
        self._last: Pending | None = None
        self._last_time = time.monotonic()
        self.last_operation = NOTHING
        self._last_done = 0

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    def newest(self) -> Contents | None:
        """The newest checkpoint that is intact; bad ones are reported and put aside. In a run that is going on, the
        main worker removes old ones meanwhile: then there are newer ones, and this looks again."""
        if self._folder is None or not self._folder.is_dir():
            return None
        for _ in range(_LOOKS):
            contents, skipped = newest_good(self._folder)
            bad = [one for one in skipped if one.path.exists()]
            for path, reason in bad:
                with contextlib.suppress(FileNotFoundError):
                    set_aside(path)
                    self._on_event("skipped checkpoint", f"{path.name}: {reason}")
            if len(bad) == len(skipped):
                break
        return contents

    def newest_name(self) -> int:
        """The operation of the newest checkpoint by its name; whether it is intact is seen when it is read."""
        found = find(self._folder) if self._folder is not None else []
        return found[0].operation if found else NOTHING

    def read(self, operation: int) -> Contents:
        """The checkpoint that this worker said it could start from. `Evicted` if it cannot be read after all: it is put
        aside, and whoever starts next takes an older one."""
        assert self._folder is not None
        path = path_of(self._folder, operation)
        try:
            return read(path)
        except CheckpointError as error:
            with contextlib.suppress(FileNotFoundError):
                set_aside(path)
                self._on_event("skipped checkpoint", f"{path.name}: {error}")
            raise Evicted(f"the checkpoint of operation {operation} cannot be read ({error})") from error

    def abandon_after(self, operation: int) -> None:
        """The run starts again from this operation: later checkpoints are of a history that goes on no more."""
        for path, number in find(self._folder) if self._folder is not None else []:
            if number > operation:
                with contextlib.suppress(FileNotFoundError):
                    set_aside(path)
                    self._on_event("skipped checkpoint", f"{path.name}: the run starts again from {operation}")

    def is_due(self, steps: int) -> bool:
        if self._folder is None:
            return False
        every_s, every_steps = self._settings.every_s, self._settings.every_steps
        by_time = every_s is not None and time.monotonic() - self._last_time >= every_s
        return by_time or (every_steps is not None and steps % every_steps == 0 and steps > 0)

    def is_due_after(self, num_done: int) -> bool:
        """The same where not every number is seen."""
        every_steps = self._settings.every_steps
        if every_steps is not None and num_done // every_steps > self._last_done // every_steps:
            self._last_done = num_done
            return self._folder is not None
        every_s = self._settings.every_s
        return self._folder is not None and every_s is not None and time.monotonic() - self._last_time >= every_s

    def take(self, contents: Contents, *, score: float | None = None, wait: bool = False) -> None:
        """Snapshot the state of a clean point; one that has a score is not skipped."""
        if self._folder is None or contents.operation == self.last_operation:
            return
        if self._keeper is None:
            settings = self._settings
            self._keeper = Keeper(
                self._folder,
                keep_last=settings.keep_last,
                keep_best=settings.keep_best,
                mode=settings.mode,
                on_event=self._on_event,
            )
        self._last_time = time.monotonic()
        pending = self._keeper.take(contents, wait=wait or score is not None)
        if pending is not None:
            self._last = pending
            self.last_operation = contents.operation
            if score is not None:
                self._keeper.score(contents.operation, score)
            if wait:
                pending.wait_written(WRITING_S)

    def settle(self, operation: int) -> None:
        if self._keeper is not None:
            self._keeper.settle(operation)

    def publish(self, operation: int) -> None:
        """Settle, and wait until what was taken last has its name, or failed."""
        self.settle(operation)
        if self._last is not None:
            self._last.wait(WRITING_S)

    def close(self) -> None:
        if self._keeper is not None:
            self._keeper.close()


def contents_of(run: str, operation: int, cursor: tuple[int, int], tree: dict[str, Any], plan: Any) -> Contents:
    """A checkpoint of a state as `Ledger.gift` gives it."""
    return Contents(
        run=run,
        operation=operation,
        epoch=cursor[0],
        position=cursor[1],
        model=tree["update"]["model"],
        state={**{key: part for key, part in tree["update"].items() if key != "model"}, **_beside(tree)},
        plan=plan,
    )


def tree_of(contents: Contents) -> dict[str, Any]:
    """The inverse of `contents_of`."""
    return {
        "applied": contents.operation,
        "update": {
            "model": dict(contents.model),
            **{key: part for key, part in contents.state.items() if key not in _BESIDE},
        },
        **_beside(contents.state),
    }


_BESIDE = ("body", "book")  # what an update does not change


def _beside(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in _BESIDE}
