"""Checkpoints beside training: a copy at a step boundary, everything else in the background.

    keeper = Keeper(folder, keep_last=3, keep_best=1)
    keeper.take(contents)          # at a step boundary: copies the tensors, returns
    keeper.settle(operation)       # later: this operation, and all before it, count
    keeper.score(operation, 0.31)  # later still, if there is a score
    keeper.close()

Promises:
- Training is blocked by `take` alone, for the time of a copy into memory that is there already (`snapshot`).
- A checkpoint gets its name when it is completely on disk and its operation is settled, whichever comes last. One whose
  operation was discarded is never seen.
- An error in the background ends that one checkpoint: it is logged, kept for `errors`, told to `on_event`. The next
  `take` tries again. A full disk does not: the snapshot stays in memory and is written when there is room, unless a
  newer one takes its place; it is told once.
- One snapshot at a time: `take` while the previous one is still being written skips (or waits, when asked to).
- Memory: one copy of the state. Disk: what is kept, and each checkpoint that is not settled yet.

Where they go is the store's affair: the folder, or the run's host; then nothing is published before that has it.

Who calls what: `take`, `settle`, `discard`, `score`, `close` from any thread of the process that made the keeper. In a
forked child a keeper is dead: `close` does nothing, all else raises. `on_event(kind, text)` is called without
locks, from the keeper's thread or from the caller of `take`; kinds are published, removed, skipped, waits,
dropped, failed.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint import files
from paceline.checkpoint.files import Contents
from paceline.checkpoint.pending import Pending, SaveStage
from paceline.checkpoint.snapshot import SnapshotBuffers
from paceline.checkpoint.stores import CheckpointStore, LocalStore
from paceline.custody.moving import CustodyError
from paceline.custody.shelf import RetentionRules
from paceline.errors import CheckpointError, DiskFull

_log = logging.getLogger(__name__)
_MAX_ERRORS = 100
ROOM_S = 1.0  # between two looks at a disk that was full
_GIVE_UP_S = 5.0  # how long a write that is no longer wanted may take to notice

OnEvent = Callable[[str, str], None]
Job = Callable[[], None]


class SaveFailure(NamedTuple):
    operation: int | None
    error: Exception


class _Unwanted(Exception):
    """Ends the writing of a checkpoint that was dropped meanwhile."""


class CheckpointWriter:
    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 3,
        keep_best: int = 1,
        on_event: OnEvent | None = None,
        make_store: Callable[[RetentionRules], CheckpointStore] | None = None,
    ) -> None:
        rules = RetentionRules(keep_last, keep_best)
        rules.check()
        self.folder = Path(folder)
        self._on_event = on_event
        self._store = LocalStore(self.folder, rules) if make_store is None else make_store(rules)
        self._buffers = SnapshotBuffers()
        self._pid = os.getpid()
        # Everything below is guarded by this lock.
        self._changed = threading.Condition()
        self._pending: dict[int, Pending] = {}
        self._copied: Pending | None = None  # the one whose tensors are in the buffers
        self._settled = -1
        self._new_scores: dict[int, float] = {}
        self._scores_due = False
        self._errors: deque[SaveFailure] = deque(maxlen=_MAX_ERRORS)
        self._closing = False
        self._thread: threading.Thread | None = None
        atexit.register(self.close)

    # -- at a step boundary ------------------------------------------------------------------------------------------

    def reserve(self, contents: Contents) -> None:
        """Have the memory for snapshots ready before the first `take`, which then costs no more than the others."""
        self._check_usable()
        with self._changed:
            if self._copied is not None:
                return
            self._buffers.reserve(files.prepare(contents))

    def wait_free(self, seconds: float) -> bool:
        """Whether the next snapshot would be taken; waits as long for that."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or self._may_be_replaced(), seconds)

    def take(self, contents: Contents) -> Pending | None:
        """Copy everything and write it in the background. None, with a warning, if the previous one is still being
        written, or if there is no memory. What cannot be saved is a `TypeError`."""
        self._check_usable()
        step, operation = contents.step, contents.operation
        pending = Pending(step, operation, self._store.path_of(step, operation), self._changed)
        with self._changed:
            if operation in self._pending:
                raise ValueError(f"operation {operation} has a snapshot already; take one for each operation")
            if self._copied is not None and self._copied.waits_for_room:
                self._copied.is_unwanted = True  # this one is newer
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._copied is None, _GIVE_UP_S)
            before = self._copied
            if before is None:
                self._copied = self._pending[operation] = pending
        if before is not None:
            text = f"operation {operation}: the checkpoint of {before.operation} is still being written"
            _log.warning("no snapshot of %s", text)
            self._tell("skipped", text)
            return None
        try:
            prepared = self._buffers.copy(files.prepare(contents))
        except BaseException as error:
            if isinstance(error, MemoryError):
                self._fail(pending, error)
                return None
            self._move(pending, SaveStage.DROPPED)
            raise
        self._hand_over(pending, prepared)
        return pending

    def _may_be_replaced(self) -> bool:
        return self._copied is None or self._copied.waits_for_room

    def _hand_over(self, pending: Pending, prepared: files.Prepared) -> None:
        with self._changed:
            is_late = self._closing  # closed meanwhile by another thread, which waits for nobody else
            if not is_late:
                pending.prepared = prepared
                self._wake()
        if is_late:
            self._end(pending, SaveStage.DROPPED)

    def _wake(self) -> None:
        if self._thread is None:
            # A daemon: an exit that did not close must not hang; what is left then is swept at the next start.
            self._thread = threading.Thread(target=self._work, name="paceline-keeper", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    # -- what became of it -------------------------------------------------------------------------------------------

    def settle(self, operation: int) -> None:
        """This operation, and all before it, count."""
        self._check_usable()
        with self._changed:
            self._settled = max(self._settled, operation)
            self._changed.notify_all()

    def discard(self, after_operation: int) -> None:
        """Operations after this one did not count: their snapshots are dropped."""
        self._check_usable()
        with self._changed:
            if self._settled > after_operation:
                raise ValueError(
                    f"operations up to {self._settled} are settled; those after {after_operation} cannot be discarded"
                )
            self._drop_after(after_operation)

    def score(self, operation: int, value: float) -> bool:
        """The lowest stay longer. False, and nothing happens, if there is no checkpoint of this operation or the value
        is not finite."""
        self._check_usable()
        with self._changed:
            is_there = operation in self._pending or self._store.has(operation)
            if not is_there or not math.isfinite(value):
                return False
            self._new_scores[operation] = float(value)
            self._scores_due = True
            self._wake()
            return True

    def errors(self) -> list[SaveFailure]:
        """What went wrong in the background, the latest last."""
        self._check_process()
        with self._changed:
            return list(self._errors)

    @property
    def buffer_bytes(self) -> int:
        """The memory that snapshots take."""
        return self._buffers.num_bytes

    def close(self, wait_s: float = 30.0) -> None:
        """Finish what is settled, drop the rest, end the thread. After `wait_s` what is settled is dropped too."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            self._drop_after(self._settled)
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)
            if thread.is_alive():
                with self._changed:
                    self._drop_after(-1)
                thread.join(_GIVE_UP_S)
            if thread.is_alive():
                self._fail(None, CheckpointError(f"the disk under {self.folder} does not answer; left it writing"))
                return
        self._store.close()
        self._buffers.release()
        atexit.unregister(self.close)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_after(self, operation: int) -> None:
        for pending in self._pending.values():
            pending.is_unwanted |= pending.operation > operation
        self._changed.notify_all()

    def _check_process(self) -> None:
        # Before any lock: in a forked child one may be held by a thread that is not there.
        if os.getpid() != self._pid:
            raise CheckpointError(f"this checkpoint writer belongs to process {self._pid}; a forked child has none")

    def _check_usable(self) -> None:
        self._check_process()
        if self._closing:
            raise CheckpointError("this checkpoint writer is closed; make another one for the folder")

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._short_job() or self._to_write())
                job = self._short_job()
                writing = self._to_write()
                if job is None and writing is None:
                    return
            if job is not None:
                job()
            elif writing is not None:
                self._write(writing)
                del writing  # an idle thread holds no snapshot

    def _short_job(self) -> Job | None:
        """What can be done between two pieces of a write. Called under the lock."""
        for pending in self._pending.values():
            if pending.stage is SaveStage.WRITTEN and pending.is_unwanted:
                return partial(self._end, pending, SaveStage.DROPPED)
            if pending.stage is SaveStage.WRITTEN and pending.operation <= self._settled:
                return partial(self._publish, pending)
        return self._tidy if self._scores_due else None

    def _to_write(self) -> Pending | None:
        copied = self._copied
        return copied if copied is not None and copied.prepared is not None else None

    def _write(self, pending: Pending) -> None:
        assert pending.prepared is not None

        def between() -> None:
            while True:
                self._check_wanted(pending)
                with self._changed:
                    job = self._short_job()
                if job is None:
                    return
                job()

        self._move(pending, SaveStage.WRITING)
        try:
            between()
            while pending.draft is None:
                try:
                    pending.draft = self._store.write(pending.prepared, between)
                except DiskFull as error:
                    self._wait_for_room(pending, error)
            self._move(pending, SaveStage.WRITTEN)
        except _Unwanted:
            self._end(pending, SaveStage.DROPPED)
        except Exception as error:
            self._fail(pending, error)

    def _wait_for_room(self, pending: Pending, error: DiskFull) -> None:
        """Keep the snapshot, say so once, and look again in a while; raises what there is if nobody wants it."""
        if not pending.waits_for_room:
            _log.error("checkpoint of operation %s: %s", pending.operation, error)
            self._tell("waits", f"operation {pending.operation} is kept in memory and tried again: {error}")
        with self._changed:
            pending.waits_for_room, pending.error = True, error
            self._changed.notify_all()
            self._changed.wait_for(lambda: pending.is_unwanted, ROOM_S)
        self._check_wanted(pending)

    def _check_wanted(self, pending: Pending) -> None:
        with self._changed:
            if pending.is_unwanted:
                raise _Unwanted

    def _publish(self, pending: Pending) -> None:
        assert pending.draft is not None
        try:
            self._store.publish(pending.draft, pending.step, pending.operation, lambda: self._check_wanted(pending))
        except _Unwanted:
            self._end(pending, SaveStage.DROPPED)
            return
        except Exception as error:
            self._fail(pending, error)
            return
        pending.draft = None
        self._tidy(pending.operation)
        self._end(pending, SaveStage.PUBLISHED)

    def _tidy(self, published: int | None = None) -> None:
        with self._changed:
            self._scores_due = False
            waiting = {operation for operation in self._pending if operation != published}
            scores = {operation: value for operation, value in self._new_scores.items() if operation not in waiting}
            for operation in scores:
                del self._new_scores[operation]
        try:
            removed = self._store.tidy(scores, published)
        except CustodyError:  # it is tidied with the next checkpoint
            with self._changed:
                self._new_scores = {**scores, **self._new_scores}
            return
        except Exception as error:
            self._fail(None, error)
            return
        for path in removed:
            self._tell("removed", str(path))

    def _move(self, pending: Pending, stage: SaveStage) -> None:
        with self._changed:
            pending.stage = stage
            if stage not in (SaveStage.COPYING, SaveStage.WRITING):
                pending.prepared = None
                if self._copied is pending:
                    self._copied = None
            if stage.is_last:
                self._pending.pop(pending.operation, None)
                if stage is not SaveStage.PUBLISHED:
                    self._new_scores.pop(pending.operation, None)
            self._changed.notify_all()

    def _end(self, pending: Pending, stage: SaveStage, reason: str = "") -> None:
        if pending.draft is not None:
            pending.draft.remove()
            pending.draft = None
        self._move(pending, stage)
        self._tell(stage.value, f"operation {pending.operation}: {reason or pending.path}")

    def _fail(self, pending: Pending | None, error: Exception) -> None:
        operation = pending.operation if pending else None
        _log.error("checkpoint of operation %s failed: %s", operation, error, exc_info=error)
        with self._changed:
            self._errors.append(SaveFailure(operation, error))
        if pending is not None:
            pending.error = error
            self._end(pending, SaveStage.FAILED, str(error))
        else:
            self._tell("failed", str(error))

    def _tell(self, kind: str, text: str) -> None:
        if self._on_event is None:
            return
        try:
            self._on_event(kind, text)
        except Exception:
            _log.exception("the callback for checkpoint events raised")
