"""The session: what a training script calls.

    session = paceline.Session(model, optimizer, schedule, data=train_set, global_batch=256, seed=0)
    for epoch in session.epochs(3):
        for batch in epoch:
            loss = session.step(loss_fn, batch)
            schedule.step()
        scores = session.evaluate(validate, valid_set)
        if session.should_stop(scores["loss"], patience=2):
            break

The body of the loop runs once for each committed step on every worker, whatever happens meanwhile. What is done again
after a loss is `loss_fn` (and `validate`), with this worker's new part of the same global batch.

Contract
- `step`, `evaluate` and `should_stop` are operations: every worker does the same ones in the same order. They return
  when the operation counts, with the same result on all.
- A worker that joins later runs the script from its top. It gets the state when it asks for its first epoch, enters
  the loop at the step that comes next, and gets recorded results for operations outside of the loops.
- At a clean point (just before a step) workers join and leave, checkpoints are taken, the run stops if asked to.
- An exception of the script ends this worker; the others go on without it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
from torch import nn

from paceline.checkpoint import Contents
from paceline.control.member_events import Fail, Kind, Leave, Ready
from paceline.control.messages import NOTHING, Phase, Plan
from paceline.control.progress import MetricRow, StepRow, WorkerRow
from paceline.data.cursor import Cursor, advance, is_finished, next_epoch
from paceline.data.dataset import fingerprint
from paceline.data.loader import LoaderOptions
from paceline.data.order import Order
from paceline.engine.base import START_AGAIN
from paceline.strategy import Agreement, AllReduce, Disagreement, Flag, Notice
from paceline.strategy.header import Row, Rows, exchange, exchange_text
from paceline.train import joining, saving
from paceline.train.batches import Batch, Batches
from paceline.train.book import Book, Mode
from paceline.train.endings import Endings
from paceline.train.errors import Evicted, NonFiniteGradient, Orphaned
from paceline.train.evaluation import Scores, Validate, evaluate
from paceline.train.membership import ALIKE, Outcome, Place, Released
from paceline.train.saving import Checkpoints, Saver
from paceline.train.training_state import Stateful, TrainingState

logger = logging.getLogger("paceline.train")


class Session:
    """`stateful` are optimizers, schedules and whatever else has a state_dict. `global_batch` is the number of samples
    of a step over all workers, however many there are."""

    def __init__(
        self,
        model: nn.Module,
        *stateful: Stateful,
        data: Any,
        global_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        loader: LoaderOptions = LoaderOptions(),
        micro_batch: int | None = None,
        clip_norm: float | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        checkpoints: Checkpoints = Checkpoints(),
    ) -> None:
        optimizers = [one for one in stateful if isinstance(one, torch.optim.Optimizer)]
        others = [one for one in stateful if not isinstance(one, torch.optim.Optimizer)]
        for one in others:
            if not isinstance(one, Stateful):
                raise TypeError(
                    f"{type(one).__name__} has no state_dict and load_state_dict; give optimizers, schedules"
                )
        if not optimizers:
            raise TypeError("a session needs an optimizer: Session(model, optimizer, ...)")
        self._model = model
        self._training = TrainingState(model, optimizers, others)
        self._strategy = AllReduce(
            model,
            optimizers,
            seed=seed,
            clip_norm=clip_norm,
            micro_batch=micro_batch,
            nonfinite=nonfinite,
            check=self._check,
        )
        self._batches = Batches(
            data,
            global_batch=global_batch,
            seed=seed,
            shuffle=shuffle,
            order=order,
            options=loader,
            min_share=2 if self._strategy.has_batch_statistics() else 1,
        )
        self._loader_options = loader
        self._seed = seed
        self._facts = {
            "dataset_length": str(self._batches.length),
            "the data's fingerprint": fingerprint(data, seed=seed)[:16],
            "global_batch": str(global_batch),
            "seed": str(seed),
            "the optimizers": ", ".join(type(one).__name__ for one in optimizers),
        }
        self._nonfinite = nonfinite
        self._book = Book()
        self._ticket = joining.find_ticket()
        folder = Path(checkpoints.folder) if checkpoints.folder is not None else joining.folder_of(self._ticket)
        self._saver = Saver(checkpoints, folder, self._tell)
        self._resumes = checkpoints.resume or self._ticket is not None
        self._start: Contents | None = None
        self._joined: joining.Joined | None = None
        self._endings = Endings(self)
        self._bound = -1  # the generation that the strategy is bound to
        self._given: Batch | None = None
        self._result: dict[str, Any] = {}  # of the last operation, for who is behind
        self._row: StepRow | None = None  # of the last step, until it is settled
        self._num_replayed = 0
        self._num_own_steps = 0
        self._stopping_agreed = False
        self._validation: dict[int, tuple[Any, Batches]] = {}
        self._in_loop = False
        self._first_epoch = 0
        self._closed = False

    # -- who and where -----------------------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, Any]:
        """The script's own values: they survive, and reach newcomers and checkpoints. Change them in the loop body."""
        return self._training.user

    @property
    def is_main(self) -> bool:
        """Whether this is the worker that prints and saves: rank 0, whoever that is at present."""
        return self.rank == 0

    @property
    def rank(self) -> int:
        return self._present_plan().rank_of(self._join().member)

    @property
    def size(self) -> int:
        """How many workers there are at present."""
        return len(self._present_plan().seats)

    def _present_plan(self) -> Plan:
        """While the next one is being made, the last one."""
        self._seat()
        joined = self._join()
        plan = joined.client.look(lambda machine: machine.plan) or joined.membership.last_plan
        return plan or joined.membership.wait_for_plan()

    @property
    def steps(self) -> int:
        """How many steps the run has done."""
        return self._book.steps

    @property
    def skipped(self) -> int:
        """How many steps did not count because a gradient was not finite."""
        return self._book.skipped

    @property
    def num_steps_per_epoch(self) -> int:
        return self._batches.num_steps

    # -- the loop ----------------------------------------------------------------------------------------------------

    def epochs(self, count: int) -> Iterator[Epoch]:
        """The epochs that are still to be done of these `count`; further calls go on from there."""
        if type(count) is not int or count < 0:
            raise ValueError(f"epochs({count!r}): give the number of epochs, 0 or more")
        self._check_open()
        self._seat()
        first, self._first_epoch = self._first_epoch, self._first_epoch + count
        while True:
            cursor = self._book.cursor
            if cursor.epoch < first:
                cursor = self._book.cursor = Cursor(first, 0)
            elif is_finished(cursor, self._batches.length):
                cursor = self._book.cursor = next_epoch(cursor, self._batches.length)
            if cursor.epoch >= first + count:
                return
            self._in_loop = True
            try:
                yield Epoch(self, cursor.epoch)
            finally:
                self._in_loop = False
            if not is_finished(self._book.cursor, self._batches.length):
                raise RuntimeError(
                    f"epoch {cursor.epoch} was left at sample {self._book.cursor.position} of {self._batches.length}; "
                    "leave the loop over epochs too, or go through all of its batches"
                )

    def _fetch(self) -> Any:
        """This worker's part of the next global batch."""
        joined = self._join()
        try:
            plan = joined.membership.wait_for_plan()
        except Released as released:
            self._go(released)
        except Evicted as evicted:
            self._give_way(evicted)
        self._training.mark()
        self._given = self._batches.fetch(plan, plan.rank_of(joined.member), self._book.cursor)
        return self._given.value

    def step(self, loss_fn: Callable[..., Any], batch: Any) -> float:
        """One update of the model from the global batch of which `batch` is this worker's part; the global mean of the
        loss."""
        given = self._given
        if given is None or batch is not given.value:
            raise RuntimeError(
                "step was called with another batch than the one that the epoch gave last; call it once for each "
                "batch, and change batches in loss_fn or collate_fn, where it can be done again"
            )
        self._given = None
        began = time.monotonic()
        loss: float = self._operate(Kind.STEP, lambda place: self._attempt_step(place, loss_fn, given, began))
        return loss

    def _attempt_step(self, place: Place, loss_fn: Callable[..., Any], given: Batch, began: float) -> Outcome:
        self._bind(place)
        self._save_if_due(place)
        batch = given
        if given.work.tag[0] != place.plan.generation:
            batch = self._batches.fetch(place.plan, place.rank, self._book.cursor)
        contribution = self._strategy.compute(
            loss_fn, batch.value, samples=batch.samples, total=batch.total, step=self._book.steps + 1
        )
        computed = time.monotonic()
        agreement = self._strategy.reduce(contribution, self._notice(place))
        return self._outcome(
            place, agreement.rows, lambda: self._commit_step(place, agreement, batch, computed - began, began)
        )

    def _commit_step(self, place: Place, agreement: Agreement, batch: Batch, compute_s: float, began: float) -> float:
        if not agreement.counts and self._nonfinite == "stop":
            raise NonFiniteGradient(f"step {self._book.steps + 1} (operation {place.operation}): {agreement.reason}")
        self._strategy.apply(agreement)
        self._training.unmark()
        book, cursor = self._book, self._book.cursor
        book.cursor = advance(cursor, batch.total, self._batches.length)
        book.steps += 1
        book.skipped += not agreement.counts
        book.loss = agreement.loss
        if not agreement.counts:
            self._tell("skipped step", agreement.reason)
        self._num_own_steps += 1
        self._settle(place.operation)
        seconds = time.monotonic() - began
        self._row = StepRow(
            operation=place.operation,
            generation=place.plan.generation,
            epoch=cursor.epoch,
            position=cursor.position,
            count=batch.total,
            loss=agreement.loss,
            seconds=seconds,
            time=time.time(),
        )
        self._report_speed(place, batch, compute_s, seconds)
        self._keep_result(place, agreement.loss)
        return agreement.loss

    # -- validation and decisions ------------------------------------------------------------------------------------

    def evaluate(self, validate: Validate, data: Any, *, batch: int | None = None) -> dict[str, Any]:
        """Call `validate` on all of `data`, each sample once, spread over all workers; the same results on all."""
        if (recorded := self._recorded()) is not None:
            return dict(recorded)
        size = batch or self._batches.global_batch
        result: dict[str, Any] = self._operate(
            Kind.EVALUATE, lambda place: self._attempt_evaluate(place, validate, data, size)
        )
        return result

    def _attempt_evaluate(self, place: Place, validate: Validate, data: Any, size: int) -> Outcome:
        parts = self._parts_of(data, size)
        was_training = self._model.training
        self._model.eval()
        try:
            scores: Scores = evaluate(validate, parts.walk(place.plan, place.rank), self._check)
        finally:
            self._model.train(was_training)
        results = scores.agree(place.group, lambda text: _exchange_text(place, text))
        rows = exchange(place.group, self._row_of(place))
        return self._outcome(place, rows, lambda: self._commit_evaluate(place, results))

    def _parts_of(self, data: Any, size: int) -> Batches:
        """Loader workers for validation data live as long as the session, like those for training."""
        known = self._validation.get(id(data))
        if known is None or known[1].global_batch != min(size, len(data)):
            if known is not None:
                known[1].close()
            parts = Batches(
                data,
                global_batch=min(size, len(data)),
                seed=self._seed,
                shuffle=False,
                order=None,
                options=self._loader_options,
                min_share=1,
            )
            known = self._validation[id(data)] = (data, parts)
        return known[1]

    def _commit_evaluate(self, place: Place, results: dict[str, Any]) -> dict[str, Any]:
        self._settle(place.operation)
        progress = self._join().client.progress
        for name, value in results.items():
            if isinstance(value, float):
                progress.add_metric(MetricRow(place.operation, name, value))
        self._record_outside(dict(results))  # copies: what the script does with its own is its affair
        self._keep_result(place, dict(results))
        return results

    def should_stop(self, score: float, *, patience: int, mode: Mode = "min", min_delta: float = 0.0) -> bool:
        """Whether the score has not become better for more than `patience` calls; the same answer on all workers. The
        model with the best score is kept among the checkpoints."""
        if patience < 0 or mode not in ("min", "max"):
            raise ValueError(f"patience={patience} must be 0 or more, mode={mode!r} either 'min' or 'max'")
        if (recorded := self._recorded()) is not None:
            return bool(recorded)
        value = float(score)
        answer: bool = self._operate(
            Kind.DECIDE, lambda place: self._attempt_decide(place, value, patience, mode, min_delta)
        )
        return answer

    def _attempt_decide(self, place: Place, score: float, patience: int, mode: Mode, min_delta: float) -> Outcome:
        rows = exchange(place.group, self._row_of(place)._replace(weight=score))
        if len({row.weight for row in rows if row.weight == row.weight}) > 1:
            logger.warning("should_stop got different scores on the workers; that of the main worker counts")
        return self._outcome(place, rows, lambda: self._commit_decide(place, rows[0].weight, patience, mode, min_delta))

    def _commit_decide(self, place: Place, score: float, patience: int, mode: Mode, min_delta: float) -> bool:
        self._settle(place.operation)
        if self._book.judge(score, mode, min_delta) and place.rank == 0:
            self._saver.mark_best(score)
        answer = self._book.num_worse > patience
        self._record_outside(answer)
        self._keep_result(place, answer)
        return answer

    # -- operations in general ---------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this session is closed; a training that goes on needs a new one")

    def _operate(self, kind: Kind, attempt: Callable[[Place], Outcome]) -> Any:
        self._check_open()
        self._seat()
        joined = self._join()

        def either(place: Place) -> Outcome:
            # The run was asked to stop: at a clean point all workers end it instead of going on.
            return attempt(place) if place.kind is kind else self._attempt_end(place)

        try:
            outcome = joined.membership.operate(kind, either)
        except Released as released:
            self._go(released)
        except Evicted as evicted:
            self._give_way(evicted)
        if outcome == _END:
            self._leave_after_end()
            raise SystemExit(0)
        return outcome

    def _go(self, released: Released) -> NoReturn:
        """The run goes on, or ended, without this worker, in order."""
        logger.info("this worker leaves: %s", released.reason)
        self._finish(10.0)
        raise SystemExit(0) from None

    def _give_way(self, reason: Evicted | Orphaned) -> None:
        """The run goes on, or is over, without this worker, which may come back as another."""
        logger.warning("this worker ends: %s", reason)
        self._finish(1.0)
        raise SystemExit(START_AGAIN) from None

    def _notice(self, place: Place) -> Notice:
        joined = self._join()
        asked = joined.client.look(lambda machine: machine.stop_asked)
        flags = (int(Flag.STOP) if asked else 0) | _KINDS.index(place.kind) << _KIND_BIT
        return Notice(place.operation, joined.membership.offer(), flags)

    def _row_of(self, place: Place) -> Row:
        notice = self._notice(place)
        return Row(notice.operation, notice.held, notice.flags)

    def _outcome(self, place: Place, rows: Rows, commit: Callable[[], Any]) -> Outcome:
        kinds = [_KINDS[row.flags >> _KIND_BIT & 3].value for row in rows]
        if len(set(kinds)) > 1:  # the headers of some kinds look alike
            each = ", ".join(f"{kind} on {rows.name_of(rank)}" for rank, kind in enumerate(kinds))
            raise Disagreement(f"{place} is {each}; {ALIKE}")
        stopping = rows.any(Flag.STOP)
        self._stopping_agreed = stopping
        return Outcome(tuple(row.held for row in rows), stopping, commit)

    def _bind(self, place: Place) -> None:
        if self._bound != place.plan.generation:
            self._bound = -1
            self._strategy.bind(place.group, place.rank, place.size)
            self._bound = place.plan.generation

    def _check(self) -> None:
        if self._joined is not None:
            self._joined.membership.check()

    def _settle(self, operation: int) -> None:
        """An operation is complete: nothing can undo what was before it."""
        if self._row is not None:
            self._join().client.progress.add(self._row)
            self._row = None
        self._saver.settle(operation - 1)

    def _report_speed(self, place: Place, batch: Batch, compute_s: float, seconds: float) -> None:
        speed = batch.samples / compute_s if compute_s > 0 else 0.0
        row = WorkerRow(place.rank, batch.samples, speed, seconds, self._book.steps, self._first_epoch)
        self._join().client.progress.describe(row)

    # -- results for who is behind, or comes later -------------------------------------------------------------------

    def _keep_result(self, place: Place, outcome: Any) -> None:
        self._result = {
            "applied": place.operation,
            "outcome": outcome,
            "book": self._book.to_tree(),
            "stopping": self._stopping_agreed,
            "row": msgspec.structs.astuple(self._row) if self._row is not None else None,
        }

    def _record_outside(self, result: Any) -> None:
        if not self._in_loop:
            # What an earlier run of the script had from here on is of no use: this one goes another way.
            self._book.outside[self._num_replayed :] = [result]
            self._num_replayed += 1

    def _recorded(self) -> Any:
        """The result that the others got at this place of the script, before this worker came."""
        self._seat()
        if self._in_loop or self._num_own_steps or self._num_replayed >= len(self._book.outside):
            return None
        self._num_replayed += 1
        return self._book.outside[self._num_replayed - 1]

    # -- state: called by the membership on the training thread ------------------------------------------------------

    def found(self, base: int) -> None:
        start, self._start = self._start, None
        if base > 0 and (start is None or start.operation != base):
            raise RuntimeError(f"this worker is to start from operation {base}, but has no checkpoint of it")
        if start is not None and start.operation == base:
            if start.position > self._batches.length:
                raise ValueError(
                    f"the checkpoint of operation {base} stands at sample {start.position} of its epoch, but the data "
                    f"has {self._batches.length} samples; resume with the data that the run began with"
                )
            self.swap(saving.tree_of(start))
            self._tell("resumed", f"from the checkpoint of operation {base}")

    def gift(self, whole: bool) -> Any:
        applied = self._join().client.look(lambda machine: machine.applied)
        if not whole:
            return {**self._result, "update": self._training.of_update()}
        return self._whole(applied)

    def _whole(self, applied: int) -> dict[str, Any]:
        return {
            "applied": applied,
            "update": self._training.of_update(),
            "body": self._training.of_body(),
            "book": self._book.to_tree(),
        }

    def swap(self, state: Any) -> None:
        self._training.load(state["update"], state["body"])
        self._book = Book.from_tree(state["book"])
        self._bound = -1
        self._start = None  # a checkpoint that was not started from

    def catch(self, operation: int, result: Any) -> Any:
        """Another worker was faster: its result of this operation counts here too."""
        if result["outcome"] == _END:
            self._settle(operation)
            return _END
        self._training.load_update(result["update"])
        self._training.unmark()
        self._book = Book.from_tree(result["book"])
        if not self._in_loop:
            self._num_replayed = len(self._book.outside)
        self._num_own_steps += 1
        self._settle(operation)
        self._row = StepRow(*result["row"]) if result["row"] is not None else None
        self._result = {name: value for name, value in result.items() if name != "update"}
        return result["outcome"]

    def stopping_in(self, result: Any) -> bool:
        return bool(result["stopping"])

    # -- checkpoints -------------------------------------------------------------------------------------------------

    def _save_if_due(self, place: Place) -> None:
        if place.rank == 0 and self._saver.is_due(self._book.steps):
            self._save(place, place.operation - 1)

    def _save(self, place: Place, operation: int, *, wait: bool = False) -> None:
        cursor = self._book.cursor
        tree = self._whole(operation)
        plan = {"generation": place.plan.generation, "shares": [seat.share for seat in place.plan.seats]}
        run = self._join().run
        self._saver.take(saving.contents_of(run, operation, (cursor.epoch, cursor.position), tree, plan), wait=wait)

    # -- beginning and end -------------------------------------------------------------------------------------------

    def _join(self) -> joining.Joined:
        """Become a member of the run: at the first call that needs it."""
        if self._joined is None:
            import torch._dynamo  # noqa: F401  # the first optimizer step would, for seconds, while others wait

            self._start = self._saver.newest() if self._resumes else None
            base = self._start.operation if self._start is not None else NOTHING
            self._joined = joining.join(self._ticket, max(base, 0), self, self._endings.orphaned)
            parameters = [one for one in self._model.parameters() if one.requires_grad]
            self._joined.groups.reserve_bytes = sum(one.numel() * one.dtype.itemsize for one in parameters)
            self._endings.watch()
            introduction = joining.introduce(self._joined, self._facts, self._model, base)
            self._joined.client.post(Ready(introduction))
        return self._joined

    def _seat(self) -> None:
        """Wait until this worker has the state of the run."""
        joined = self._join()
        if joined.client.look(lambda machine: machine.phase) is Phase.READY or not self._num_own_steps:
            try:
                joined.membership.wait_for_state()
            except Released as released:
                self._go(released)
            except (Evicted, Orphaned) as error:
                self._give_way(error)

    def close(self) -> None:
        """The end of the training: returns when all workers have come to it. Called when the script ends, if not
        before."""
        if self._closed:
            return
        if self._joined is not None and not self._endings.has_failed:
            try:
                outcome = self._joined.membership.operate(Kind.END, self._attempt_end)
                if outcome == _END:
                    self._leave_after_end()
            except Released as released:
                logger.info("this worker leaves: %s", released.reason)
        self._finish(10.0)

    def _attempt_end(self, place: Place) -> Outcome:
        # Written before the others are let go, published when all have come to the end.
        if place.rank == 0 and self._saver.is_on and self._book.steps:
            self._save(place, place.operation - 1, wait=True)
        rows = exchange(place.group, self._row_of(place))

        def commit() -> Any:
            self._settle(place.operation)
            self._keep_result(place, _END)
            return _END

        return self._outcome(place, rows, commit)

    def _leave_after_end(self) -> None:
        self._saver.close()
        assert self._joined is not None
        self._joined.membership.wait_for_release()
        self._finish(10.0)

    def fail(self, cause: str) -> None:
        """The script raised: say why, and go."""
        if self._joined is not None and not self._closed:
            self._joined.client.post(Fail(cause))
            self._finish(5.0)

    def leave(self) -> None:
        """Ask to leave after the step under way; alone, to stop."""
        if self._joined is not None:
            self._joined.client.post(Leave())

    def _finish(self, flush_s: float) -> None:
        self._closed = True
        self._endings.close()
        self._saver.close()
        self._batches.close()
        for _, parts in self._validation.values():
            parts.close()
        self._strategy.close()
        if self._joined is not None:
            self._joined.close(flush_s)

    def _tell(self, kind: str, text: str) -> None:
        """For the run's log."""
        logger.info("%s: %s", kind, text)
        if self._joined is not None and kind in _TOLD:
            self._joined.client.progress.remark(*_TOLD[kind](text))

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self._endings.failed(error)


class Epoch:
    """One pass over the data: an iterable of this worker's parts of the global batches that are still to be done."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number = number

    def __len__(self) -> int:
        """The number of steps of the whole epoch."""
        return self._session.num_steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        session = self._session
        while not is_finished(session._book.cursor, session._batches.length):
            before = session._book.cursor
            yield session._fetch()
            if session._book.cursor == before:
                raise RuntimeError("a batch was taken, but session.step was not called for it")

    def __repr__(self) -> str:
        return f"Epoch({self.number})"


_END = "the end"
_KINDS = list(Kind)
_KIND_BIT = 8  # in the flags of a header, of which the session owns those below 16
# What of a worker's events is worth a line in the run's log.
_TOLD: dict[str, Callable[[str], tuple[str, str]]] = {
    "published": lambda text: ("checkpoint", text),
    "failed": lambda text: ("warning", f"no checkpoint: {text}"),
    "skipped": lambda text: ("warning", f"no checkpoint: {text}"),
    "skipped checkpoint": lambda text: ("warning", f"unreadable, put aside: {text}"),
    "skipped step": lambda text: ("warning", f"step skipped: {text}"),
    "resumed": lambda text: ("resumed", text),
}


def _exchange_text(place: Place, text: bytes) -> list[bytes]:
    return exchange_text(place.group, text) if place.group is not None else [text]
