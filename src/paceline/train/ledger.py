"""The training state of a worker as the membership and the checkpoints see it.

It is made (new, or from a checkpoint), given to others, received from one of them, caught up with, saved. Everything
here happens on the training thread.

Invariants
- After the same operation the books of all workers are the same, and what `whole` gives is the same state.
- Nothing that is received changes anything before it is complete.
- A best score that is not kept yet stands in the book, so that whoever is main at the next clean point keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint import Contents
from paceline.control.leases.lease_set import LeaseSet, lease_set
from paceline.control.messages.plan import NOTHING
from paceline.control.messages.progress import ProgressKeeper, StepRow, Unrecorded
from paceline.data.cursor import Cursor, num_steps
from paceline.errors import Orphaned
from paceline.train import saving
from paceline.train.book import Book
from paceline.train.operation import Place
from paceline.train.sampling import SAMPLING, Sampling, misfit
from paceline.train.saving import Saver
from paceline.train.training_state import TrainingState
from paceline.wire.decoding import decode

END = "the end"  # the outcome of the last operation


class TrainingLedger:
    """`length` is that of the data, `batch` the samples of a step or lease; `leased` says which of the two are done,
    `resumes` whether a checkpoint may be started from. `run`, `progress` and `look_applied` are known once the worker
    has joined."""

    def __init__(
        self,
        training: TrainingState,
        saver: Saver,
        length: int,
        tell: Callable[[str, str], None],
        *,
        sampling: Sampling,
        leased: bool,
        resumes: bool,
    ) -> None:
        self.training = training
        self.saver = saver
        self.book = Book()
        self.num_swaps = 0
        self.row: StepRow | None = None  # of the last step, until it is settled
        self.in_loop = False
        self._length = length
        self._sampling = sampling
        self._leased = self.goes_on = leased
        self._tell = tell
        self._resumes = resumes
        self._has_looked = False
        self._start: Contents | None = None
        self._result: dict[str, Any] = {}  # of the last operation, for who is behind
        self._has_worked = False
        self._num_replayed = 0

    def connect(self, run: str, progress: ProgressKeeper, look_applied: Callable[[], int]) -> None:
        self._run = run
        self._progress = progress
        self._look_applied = look_applied

    # -- the beginning -----------------------------------------------------------------------------------------------

    def look_for_start(self) -> int:
        """The operation of the newest checkpoint; `NOTHING` if there is none. The first look reads it and holds it
        ready, if it is on this machine; later ones, of a worker that waits, go by its name."""
        self.saver.claim()
        if not self._resumes:
            return NOTHING
        if not self._has_looked and self.saver.is_near:
            self._has_looked = True
            self._start = self.saver.newest()
            return self._start.operation if self._start is not None else NOTHING
        newest = self.saver.newest_name()
        if self._start is not None and self._start.operation != newest:
            self._start = None
        return newest

    def found(self, base: int) -> None:
        start, self._start = self._start, None
        if base > 0 and (start is None or start.operation != base):
            start = self.saver.read(base)
        if self._resumes:
            if base <= 0:
                self.saver.check_intact()
            self.saver.abandon_after(base)
        if start is not None and start.operation == base:
            if start.position > self._length:
                raise ValueError(
                    f"the checkpoint of operation {base} stands at sample {start.position} of its epoch, but the data "
                    f"has {self._length} samples; resume with the data that the run began with"
                )
            self._check_sampling(start)
            self.swap(saving.tree_of(start))
            if (rows := start.state.get(saving.UNRECORDED)) is not None and not self._leased:
                self._progress.restore(decode(rows, tuple[StepRow, ...]))
            self._tell("resumed", f"from the checkpoint of operation {base}{self._go_on_in_steps(start)}")

    def _check_sampling(self, start: Contents) -> None:
        if (kept := start.state.get(SAMPLING)) is None:
            return
        why = misfit(
            kept,
            self._sampling,
            position=start.position,
            leases=list(start.state.get("leases", {}).values()),
            is_leased=self._leased,
        )
        if why:
            raise ValueError(f"the checkpoint of operation {start.operation} stands {why}")

    def _go_on_in_steps(self, start: Contents) -> str:
        """Where leases were done before, and steps are from now on: begin after those that were done in a row."""
        records = [lease_set(*record) for record in start.state.get("leases", {}).values()]
        if self._leased or not records:
            return ""
        cursor = self.book.cursor
        done = functools.reduce(LeaseSet.meet, records)
        either = functools.reduce(LeaseSet.joined, records)
        position = min(done.prefix * self._sampling.batch, self._length)
        if done.epoch != cursor.epoch or position < cursor.position:
            return ""
        self.book.cursor = Cursor(cursor.epoch, position)
        self.book.steps = self.book.steps_before + num_steps(position, self._sampling.batch)
        num_again = len(either) - done.prefix
        return f"; {num_again} updates beyond sample {position} of the epoch are done again" if num_again else ""

    # -- from worker to worker ---------------------------------------------------------------------------------------

    def gift(self, whole: bool) -> Any:
        if whole:
            # With the last result and the rows, because the receiver may soon be the only one that has them.
            rows = msgspec.msgpack.encode(self._progress.unrecorded())
            return {**self._whole(self._look_applied()), "last": self._last(), "rows": rows}
        return {**self._last(), "update": self.training.of_update()}

    def _last(self) -> dict[str, Any]:
        """What the last operation came to; empty before the first."""
        return {**self._result, "book": self._result["book"].to_tree()} if self._result else {}

    def _whole(self, applied: int) -> dict[str, Any]:
        return {
            "applied": applied,
            "update": self.training.of_update(),
            "body": self.training.of_body(),
            "book": self.book.to_tree(),
        }

    def swap(self, state: Any) -> None:
        self.training.load(state["update"], state["body"])
        self.book = Book.from_tree(state["book"])
        self.num_swaps += 1
        self._start = None  # a checkpoint that was not started from
        if last := state.get("last"):  # a checkpoint has none: nobody is behind it
            self._result = {**last, "book": Book.from_tree(last["book"])}
            self.row = StepRow(*last["row"]) if last["row"] is not None else None
        if "rows" in state:
            self._progress.inherit(decode(state["rows"], Unrecorded))

    def catch(self, operation: int, result: Any) -> Any:
        """Another worker was faster: its result of this operation counts here too."""
        if result["outcome"] == END:
            return END
        self.training.load_update(result["update"])
        self.training.unmark()
        self.book = Book.from_tree(result["book"])
        if not self.in_loop:
            self._num_replayed = len(self.book.outside)
        self._has_worked = True
        self.row = StepRow(*result["row"]) if result["row"] is not None else None
        self.keep_result(operation, result["outcome"], result["stopping"])
        return result["outcome"]

    def stopping_in(self, result: Any) -> bool:
        return bool(result["stopping"])

    # -- operations --------------------------------------------------------------------------------------------------

    @property
    def has_worked(self) -> bool:
        """Whether this worker has taken part in a step."""
        return self._has_worked

    def settle(self, operation: int) -> None:
        """Nothing can undo this operation any more."""
        if self.row is not None:
            self._progress.add(self.row)
            self.row = None
        self.saver.settle(operation)

    def stepped(self, row: StepRow) -> None:
        """An update was applied, and counted in the book."""
        self.training.unmark()
        self._has_worked = True
        self.book.unkept_best = None  # the main worker has kept it before this step
        self.row = row

    def keep_result(self, operation: int, outcome: Any, stopping: bool) -> None:
        self._result = {
            "applied": operation,
            "outcome": outcome,
            "book": self.book.copy(),
            "stopping": stopping,
            "row": msgspec.structs.astuple(self.row) if self.row is not None else None,
        }

    def record_outside(self, result: Any) -> None:
        """A result that a worker that comes later, and runs the script from its top, will ask for."""
        if not self.in_loop:
            # What an earlier run of the script had from here on is of no use: this one goes another way.
            self.book.outside[self._num_replayed :] = [result]
            self._num_replayed += 1

    def recorded(self) -> Any:
        """The result that the others got at this place of the script, before this worker came."""
        if self.in_loop or self._has_worked or self._num_replayed >= len(self.book.outside):
            return None
        self._num_replayed += 1
        return self.book.outside[self._num_replayed - 1]

    def leased(self, number: int) -> None:
        """This worker has done a lease."""
        self.training.unmark()
        self._has_worked = True
        self.book.unkept_best = None
        self.book.steps = max(self.book.steps, number)

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def save_if_due(self, place: Place) -> None:
        """Just before a step: on the main worker."""
        if place.rank == 0 and (self.book.unkept_best is not None or self.saver.is_due(self.book.steps)):
            self._save(place)

    def save_at_end(self, place: Place) -> None:
        """Written when the main worker comes to the end; `publish_at_end` when all have."""
        if place.rank == 0 and self.book.steps:
            self._save(place, wait=True)

    def publish_at_end(self, place: Place) -> None:
        """Return when the last checkpoint is there, whichever worker has to write it: if the main one dies before, this
        raises on the others, which come to the end again."""
        if place.rank == 0:
            self.saver.publish(place.operation - 1)
        if place.group is not None:
            place.group.barrier()

    def save_leases_if_due(self, num_done: int) -> None:
        """Between two leases, on the main worker. Where there are no steps, what is done is numbered by operations and
        leases together: it grows with either."""
        if self.book.unkept_best is not None or self.saver.is_due_after(num_done):
            self.save_leases(num_done)

    def save_leases(self, num_done: int) -> None:
        number = self._look_applied() + num_done
        self._write(number, {}, wait=False)
        self.saver.settle(number)

    def save_leases_at_end(self, num_done: int) -> None:
        """What was done may not be known to the last one; then there is one of this number, which may have less."""
        number = max(self._look_applied() + num_done, self.saver.last_operation + 1)
        self._write(number, {}, wait=True)
        self.saver.settle(number)

    def _save(self, place: Place, *, wait: bool = False) -> None:
        plan = {"generation": place.plan.generation, "shares": [seat.share for seat in place.plan.seats]}
        self._write(place.operation - 1, plan, wait=wait)

    def _write(self, operation: int, plan: dict[str, Any], *, wait: bool) -> None:
        if self.saver.is_on:
            self.saver.take(self._contents(operation, plan), score=self.book.unkept_best, wait=wait)

    def _contents(self, operation: int, plan: dict[str, Any]) -> Contents:
        cursor = self.book.cursor
        tree = {**self._whole(operation), "update": self.training.of_everything()}
        tree["book"]["unkept_best"] = None
        tree[SAMPLING] = self._sampling.to_tree()
        tree[saving.UNRECORDED] = msgspec.msgpack.encode(self._unrecorded())
        return saving.contents_of(self._run, operation, (cursor.epoch, cursor.position), tree, plan)

    def _unrecorded(self) -> list[StepRow]:
        """The last step is settled when a checkpoint of it is published."""
        rows = self._progress.unrecorded()
        return [*rows.restored, *rows.steps, *([self.row] if self.row is not None else [])]

    def recall(self, with_optimizers: bool) -> int:
        """A server was lost and nobody else had its ranges: load what the newest checkpoint has of them; the number of
        its last update."""
        if (newest := self.saver.newest()) is None:
            return 0
        tree = saving.tree_of(newest)
        if with_optimizers:
            self.training.load_optimizers(tree["update"]["optimizers"])
        self.training.load_elsewhere(tree["update"])
        return int(tree["book"]["steps"])

    def leave_behind(
        self, num_leases: int, step_on_servers: Callable[[], int], complete: Callable[[], bool] | None
    ) -> Path | None:
        """Write what this worker holds on its own host; where. None if nothing was trained yet. If this worker was
        about to make a step, the servers that are left make it now, and `complete` counts it. Servers that are ahead of
        this worker hold samples that its cursor does not count."""
        if not self.book.steps:
            return None
        if complete is not None:
            self.training.of_everything()
            complete()
        contents = self._contents(self._look_applied() + num_leases, {})
        if step_on_servers() > self.book.steps:
            raise Orphaned(
                f"servers have made step {step_on_servers()}, and this worker has seen {self.book.steps} of them"
            )
        return self.saver.write_held(contents)
