"""Validation and decisions: operations of all workers, with the same result on each."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from paceline.control.messages.progress import MetricRow
from paceline.train.batches import ValidationData
from paceline.train.book import Mode
from paceline.train.evaluation import Scores, Validate, evaluate
from paceline.train.headers import Headers, all_texts
from paceline.train.joining import Joined
from paceline.train.ledger import TrainingLedger
from paceline.train.membership import Attempt, Place
from paceline.train.sharing import Sharing

logger = logging.getLogger("paceline.train")


class Evaluator:
    """`check` is called between two batches of a validation: what it raises ends it."""

    def __init__(
        self,
        join: Callable[[], Joined],
        headers: Headers,
        ledger: TrainingLedger,
        model: nn.Module,
        data: ValidationData,
        sharing: Sharing,
        check: Callable[[], None],
    ) -> None:
        self._join = join
        self._headers = headers
        self._ledger = ledger
        self._model = model
        self._data = data
        self._sharing = sharing
        self._check = check

    # -- validation --------------------------------------------------------------------------------------------------

    def attempt_evaluate(self, place: Place, validate: Validate, data: Any, size: int) -> Attempt:
        parts = self._data.parts_of(data, size)
        was_training = self._model.training
        self._model.eval()
        try:
            shares = self._sharing.shares(place.plan, self._ledger.book)
            scores: Scores = evaluate(validate, parts.walk(shares, place.rank), self._check)
        finally:
            self._model.train(was_training)
        results = scores.agree(place.group, lambda text: all_texts(place, text))
        rows = self._headers.exchange(place)
        return self._headers.outcome(place, rows, lambda: self._commit_evaluate(place, results))

    def _commit_evaluate(self, place: Place, results: dict[str, Any]) -> dict[str, Any]:
        self._ledger.settle(place.operation)
        progress = self._join().client.progress
        for name, value in results.items():
            if isinstance(value, float):
                progress.add_metric(MetricRow(place.operation, name, value))
        self._ledger.record_outside(dict(results))  # copies: what the script does with its own is its affair
        self._ledger.keep_result(place.operation, dict(results), self._headers.stopping_agreed)
        return results

    # -- decisions ---------------------------------------------------------------------------------------------------

    def attempt_decide(
        self, place: Place, score: float, mode: Mode, min_delta: float, patience: int | None = None
    ) -> Attempt:
        """With `patience`, whether to stop; without, whether the score is the best so far."""
        rows = self._headers.exchange(place, weight=score)
        if len({row.weight for row in rows if row.weight == row.weight}) > 1:
            logger.warning("the workers gave different scores; that of the main worker counts")
        return self._headers.outcome(
            place, rows, lambda: self._commit_decide(place, rows[0].weight, mode, min_delta, patience)
        )

    def _commit_decide(self, place: Place, score: float, mode: Mode, min_delta: float, patience: int | None) -> bool:
        book = self._ledger.book
        self._ledger.settle(place.operation)
        answer = book.judge(score, mode, min_delta)
        if patience is not None:
            answer = book.num_worse > patience
            book.is_stopped = answer and self._ledger.in_loop
        self._ledger.record_outside(answer)
        self._ledger.keep_result(place.operation, answer, self._headers.stopping_agreed)
        return answer
