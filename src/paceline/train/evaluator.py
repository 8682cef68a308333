"""Validation and decisions: operations of all workers, with the same result on each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from paceline.control.machines.member_events import OperationKind
from paceline.control.messages.plan import Plan
from paceline.control.messages.progress import MetricRow
from paceline.strategy.header import HeaderRows
from paceline.train.book import Mode
from paceline.train.evaluation import Scores, Validate, evaluate
from paceline.train.loops.base import Loop
from paceline.train.operation import Place
from paceline.train.parts import TrainingParts

if TYPE_CHECKING:
    from paceline.train.run import Run

logger = logging.getLogger("paceline.train")


class Evaluation:
    """`validate` on all of `data`, in pieces of `size` samples."""

    kind = OperationKind.EVALUATE

    def __init__(self, run: Run, parts: TrainingParts, loop: Loop, validate: Validate, data: Any, size: int) -> None:
        self._run = run
        self._parts = parts
        self._loop = loop
        self._validate = validate
        self._data = data
        self._size = size
        self._results: dict[str, Any] = {}

    def attempt(self, place: Place) -> HeaderRows:
        self._loop.refresh()
        parts, model = self._parts, self._parts.model
        batches = parts.validation.parts_of(self._data, self._size)
        was_training = model.training
        model.eval()
        try:
            shares = parts.sharing.shares(place.plan, parts.ledger.book)
            scores: Scores = evaluate(self._validate, batches.walk(shares, place.rank), self._run.check)
        finally:
            model.train(was_training)
        self._results = scores.agree(place.group, place.all_texts)
        return self._run.exchange(place)

    def prepare(self, plan: Plan) -> None:
        """All of it is done again."""

    def commit(self, place: Place) -> dict[str, Any]:
        progress = self._run.joined.client.progress
        for name, value in self._results.items():
            if isinstance(value, float):
                progress.add_metric(MetricRow(place.operation, name, value))
        self._parts.ledger.record_outside(dict(self._results))
        return self._results


class Decision:
    """With `patience`, whether to stop; without, whether the score is the best so far."""

    kind = OperationKind.DECIDE

    def __init__(
        self, run: Run, parts: TrainingParts, score: float, mode: Mode, min_delta: float, patience: int | None
    ) -> None:
        self._run = run
        self._ledger = parts.ledger
        self._score = score
        self._mode: Mode = mode
        self._min_delta = min_delta
        self._patience = patience

    def attempt(self, place: Place) -> HeaderRows:
        rows = self._run.exchange(place, weight=self._score)
        if len({row.weight for row in rows if row.weight == row.weight}) > 1:
            logger.warning("the workers gave different scores; that of the main worker counts")
        self._agreed = rows[0].weight
        return rows

    def prepare(self, plan: Plan) -> None:
        """Nothing takes time."""

    def commit(self, place: Place) -> bool:
        ledger = self._ledger
        answer = ledger.book.judge(self._agreed, self._mode, self._min_delta)
        if self._patience is not None:
            answer = ledger.book.num_worse > self._patience
            ledger.book.is_stopped = answer and ledger.in_loop
        ledger.record_outside(answer)
        return answer
