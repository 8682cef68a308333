"""Losses and metrics as plain lists, for plots and notebooks; and which rows of a run count.

    from pathlib import Path
    from paceline.control.journal.reader import RunReader
    from paceline.watch.history import losses, metrics

    with RunReader(Path("runs/digits")) as reader:
        plt.plot(*losses(reader))
        plt.plot(*metrics(reader)["accuracy"])

Only the one history that led to the model is returned: what was done before a rollback and not yet again is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from paceline.control.journal.reader import PlanRow, RunReader, StepRecord
from paceline.control.messages.plan import PlanStart
from paceline.watch.audit import history_of


class Series(NamedTuple):
    """Two lists of one length; a value that is not a number is `nan`."""

    operations: list[int]
    values: list[float]


def losses(reader: RunReader) -> Series:
    """The loss of every step, under its operation."""
    steps = standing_steps(reader.steps(), reader.plans())
    return Series([step.operation for step in steps], [_number(step.loss) for step in steps])


def metrics(reader: RunReader) -> dict[str, Series]:
    """Every metric that was recorded, by its name."""
    foundings = foundings_of(reader.plans())
    series: dict[str, Series] = {}
    for row in reader.metrics():
        # A metric does not say of which founding it is; its time does.
        if not any(row.operation > plan.base and row.time < plan.time for plan in foundings):
            operations, values = series.setdefault(row.name, Series([], []))
            operations.append(row.operation)
            values.append(_number(row.value))
    return series


def foundings_of(plans: Iterable[PlanRow]) -> list[PlanRow]:
    """The plans by which the run was founded, the first one and those after a loss of everything, in order."""
    return [plan for plan in plans if plan.start == PlanStart.FOUND.value]


def standing_steps(steps: Iterable[StepRecord], plans: Sequence[PlanRow]) -> list[StepRecord]:
    """The rows that count, also when the newest founding has none of its own yet."""
    foundings = foundings_of(plans)
    return [
        step
        for step in history_of(steps)
        if not any(step.founding < plan.generation and step.operation > plan.base for plan in foundings)
    ]


def _number(value: float | None) -> float:
    return math.nan if value is None else value
