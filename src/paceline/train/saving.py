"""When checkpoints are taken, and by whom: the main worker, at a clean point, published when the step is settled."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import CheckpointWriter, Contents
from paceline.checkpoint.pending import Pending, SaveStage
from paceline.control.messages.plan import NOTHING
from paceline.custody.depot import Depot
from paceline.custody.moving import CustodyError
from paceline.custody.shelf import RetentionRules
from paceline.errors import CheckpointError, CorruptCheckpoint, Evicted
from paceline.train.folder_claim import FolderClaim
from paceline.train.halting import write_held
from paceline.train.sampling import SAMPLING
from paceline.train.sources import CheckpointSource, choose

logger = logging.getLogger("paceline.train")

WRITING_S = 300.0
TAKING_S = 600.0  # for an older one to be out of the way
SENDING_S = 540.0  # one that does not move for a minute has failed before
_SLICE_S = 0.5


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where checkpoints are written, and how often.

    >>> session = paceline.Session(
    ...     model, optimizer, data=data, global_batch=256, checkpoints=paceline.Checkpoints(folder="kept", resume=True)
    ... )

    `folder` is the run's own by default; a script that runs alone writes none unless it names a folder. With `resume`,
    and when a run has lost all of its workers, the training starts from the newest checkpoint. `only_trained` leaves
    frozen parameters out, as for LoRA: a script that resumes builds the model with them first."""

    folder: str | Path | None = None
    every_s: float | None = 60.0
    every_steps: int | None = None
    keep_last: int = 3
    keep_best: int = 1
    resume: bool = False
    only_trained: bool = False

    def __post_init__(self) -> None:
        if self.every_s is not None and not self.every_s >= 0:
            raise ValueError(f"every_s={self.every_s}: give seconds, or None")
        if self.every_steps is not None and self.every_steps < 1:
            raise ValueError(f"every_steps={self.every_steps}: give 1 or more, or None")
        RetentionRules(self.keep_last, self.keep_best).check()


class Saver:
    """A keeper that is made when this worker is main for the first time."""

    def __init__(
        self,
        settings: Checkpoints,
        folder: Path | None,
        on_event: Callable[[str, str], None],
        *,
        own: Path | None = None,
        depot: Depot | None = None,
        claim: FolderClaim | None = None,
    ) -> None:
        """`own` is the folder of the run on this machine, `depot` the way to the run's host where that is another.
        `claim` is for a folder that the script has named."""
        self._settings = settings
        self._folder = folder
        self._on_event = on_event
        self._own = own
        self._depot = depot
        self._claim = claim
        self.is_orphaned: Callable[[], bool] = lambda: False  # whether the run's host is taken for lost
        self.is_quiet: Callable[[], bool] = lambda: False  # whether it has not been heard of for a moment
        self._keeper: CheckpointWriter | None = None
        self._last: Pending | None = None
        self._last_time = time.monotonic()
        self.last_operation = NOTHING
        self._owed = NOTHING  # the operation of the end, whose state must be in a checkpoint
        self._last_done = 0
        self._is_awaited = False  # the end waits for its checkpoint
        self._is_given_up = False  # and need not any more
        self._has_said = False

    @property
    def is_on(self) -> bool:
        return self._folder is not None

    @functools.cached_property
    def _source(self) -> CheckpointSource:
        assert self._folder is not None
        source = choose(self._folder, self._own, self._depot, is_given=self._settings.folder is not None)
        if not source.is_near:
            self._claim = None  # they go into the folder of the run
        elif self._claim is not None:
            self._claim.take()
        return source

    def claim(self) -> None:
        """`CheckpointError` if the folder that the script has named holds checkpoints of another training."""
        _ = self._source if self._folder is not None else None

    def newest(self) -> Contents | None:
        """The newest checkpoint that is intact; bad ones that are newer are reported and put aside."""
        return self._source.newest(self._on_event) if self._folder is not None else None

    @property
    def is_near(self) -> bool:
        """Whether checkpoints are on this machine, so that looking at one costs little."""
        return self._folder is None or self._source.is_near

    def newest_name(self) -> int:
        """The operation of the newest checkpoint by its name; whether it is intact is seen when it is read."""
        found = self._source.operations() if self._folder is not None else []
        return found[0] if found else NOTHING

    def read(self, operation: int) -> Contents:
        """The checkpoint that this worker said it could start from. `Evicted` if it cannot be read after all: it is put
        aside, and whoever starts next takes an older one. If there is none, `CorruptCheckpoint`."""
        try:
            return self._source.read(operation)
        except CheckpointError as error:
            self.check_intact()
            self._source.set_aside([operation])
            self._on_event("skipped checkpoint", f"operation {operation}: {error}")
            raise Evicted(f"the checkpoint of operation {operation} cannot be read ({error})") from error
        except CustodyError as error:
            raise Evicted(f"the checkpoint of operation {operation} cannot be had ({error})") from error

    def check_intact(self) -> None:
        """A run that was trained does not begin anew by itself, and what is left of its checkpoints stays where it is:
        `CorruptCheckpoint` if there are any, and none can be read."""
        if self._folder is None or not self._source.operations() or not (damaged := self._source.damaged()):
            return
        which = "; ".join(why if path.name in why else f"{path.name}: {why}" for path, why in damaged)
        raise CorruptCheckpoint(
            f"none of the run's checkpoints can be read, so it cannot go on: {which}. They stay where they are, in "
            f"{damaged[0].path.parent}: put a good copy in their place, or move them away, and it begins anew"
        )

    def abandon_after(self, operation: int) -> None:
        """The run starts again from this operation: later checkpoints are of a history that goes on no more."""
        later = [number for number in self._source.operations() if number > operation] if self._folder else []
        self._source.set_aside(later)
        for number in later:
            self._on_event("skipped checkpoint", f"operation {number}: the run starts again from {operation}")

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
        """Snapshot the state of a clean point; one that has a score is not skipped while an older one gets on. That of
        the end waits for as long as it takes."""
        if self._folder is None:
            return
        if wait:
            self._owed = contents.operation
        if contents.operation == self.last_operation or self._is_in_vain():
            return
        if self._keeper is None:
            settings = self._settings
            self._keeper = CheckpointWriter(
                self._folder,
                keep_last=settings.keep_last,
                keep_best=settings.keep_best,
                on_event=self._on_event,
                make_store=self._source.store,
            )
        if self._claim is not None:
            self._claim.check()
        self._last_time = time.monotonic()
        if wait or score is not None:
            self._wait_until_free(self._keeper, is_last=wait)
        pending = self._keeper.take(contents)
        if pending is not None:
            self._last = pending
            self.last_operation = contents.operation
            if score is not None:
                self._keeper.score(contents.operation, score)
            if wait:
                self._wait(pending.wait_written)

    def _wait_until_free(self, keeper: CheckpointWriter, *, is_last: bool) -> None:
        """Training must not stand still because the run's host does."""
        ends_at = time.monotonic() + TAKING_S
        while not keeper.wait_free(_SLICE_S) and time.monotonic() < ends_at and not self._is_in_vain():
            if not is_last and self._depot is not None and self.is_quiet():
                return

    def write_held(self, contents: Contents) -> Path:
        """Leave this on this host, in the folder of the run here: the run's host is lost."""
        folder = self._own or self._folder
        assert folder is not None
        settings = self._settings
        return write_held(folder, contents, RetentionRules(settings.keep_last, settings.keep_best))

    def settle(self, operation: int) -> None:
        if self._keeper is not None:
            self._keeper.settle(operation)

    def publish(self, operation: int) -> None:
        """Settle, and wait until what was taken last has its name, or failed."""
        self.settle(operation)
        if (last := self._last) is not None:
            self._wait(lambda seconds: last.wait(seconds).is_last)

    def _wait(self, wait: Callable[[float], bool]) -> None:
        """As long as it takes, but not for a run's host that is gone."""
        limit_s = WRITING_S if self._source.is_near else SENDING_S
        ends_at = time.monotonic() + limit_s
        self._is_awaited = True
        while not wait(_SLICE_S) and time.monotonic() < ends_at and not self._is_in_vain() and not self._is_given_up:
            self._say_once(limit_s)
        self._is_awaited = False

    def _say_once(self, limit_s: float) -> None:
        """To the person who waits: the run's log may be on the disk that is full."""
        last = self._last
        if last is None or not last.waits_for_room or self._has_said:
            return
        self._has_said = True
        logger.warning(
            "the last checkpoint waits for room, %g minutes at most: %s. Ctrl-C again ends the run without it",
            limit_s / 60,
            last.error,
        )

    def give_up(self) -> bool:
        """The end need not wait any more for its checkpoint; False if it does not wait. For a signal's handler: it
        takes no lock."""
        self._is_given_up = self._is_given_up or self._is_awaited
        return self._is_given_up

    def unsaved(self) -> str:
        """Why the state of the end is in no checkpoint, in words; empty if it is in one. Asked after `close`, which may
        still have published it."""
        last = self._last if self._last is not None and self._last.operation == self._owed else None
        if self._owed == NOTHING or self._is_in_vain() or (last is not None and last.stage is SaveStage.PUBLISHED):
            return ""
        why = "the one before it is still being written" if last is None else last.error or "the disk does not answer"
        newest = self.newest_name() if self.is_near else NOTHING
        others = f"; the newest checkpoint is that of operation {newest}" if newest != NOTHING else ""
        return f"the state after operation {self._owed}, the last one, is in no checkpoint: {why}{others}"

    def _is_in_vain(self) -> bool:
        return self._depot is not None and self.is_orphaned()

    def close(self) -> None:
        if self._keeper is not None and (self._is_in_vain() or self._is_given_up):
            self._keeper.close(wait_s=_SLICE_S)
        elif self._keeper is not None:
            self._keeper.close()
        if self._depot is not None:
            self._depot.close()


def contents_of(run: str, operation: int, cursor: tuple[int, int], tree: dict[str, Any], plan: Any) -> Contents:
    """A checkpoint of a state as `Ledger.gift` gives it."""
    return Contents(
        run=run,
        step=tree["book"]["steps"],
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


UNRECORDED = "unrecorded"  # rows of steps that may not be in the run's database; older checkpoints have none
_BESIDE = ("body", "book", UNRECORDED, SAMPLING)  # what an update does not change


def _beside(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: state[key] for key in _BESIDE if key in state}
