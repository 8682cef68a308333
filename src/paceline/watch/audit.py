"""Whether every sample of every epoch was committed once, by the rows of the run's steps. Pure.

The *history* is what led to the state of the model. A run that lost all holders of its state is founded again from a
checkpoint: rows of an older founding above the new one's first row are obsolete, and do not count (`history_of`).
Steps that were done again are told apart from samples that count twice: the first is work lost, the second is a fault.

Only what was recorded is audited. Where samples are missing and operations have no row either, the record may be what
is incomplete; the details say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

import msgspec

from paceline.control.journal.reader import StepRecord
from paceline.watch import words

MAX_SHOWN = 5  # ranges in one line


class SampleSpan(msgspec.Struct, frozen=True, order=True):
    """Positions start..stop-1 of an epoch's order."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"{self.start:,}" if len(self) == 1 else f"{self.start:,} to {self.stop - 1:,}"


class EpochAudit(msgspec.Struct, frozen=True, kw_only=True):
    """`num_samples` counts different positions; `missing` are those that the history went past, `twice` those that it
    has more than once, `outside` those that the dataset does not have. `uneven` are operations whose batch does not
    begin or end where the global batch says. What comes before `first` belongs to an earlier record. The last epoch may
    be unfinished: what is not there yet is not missing.
    """

    epoch: int
    num_samples: int
    dataset_length: int
    first: int
    missing: tuple[SampleSpan, ...]
    twice: tuple[SampleSpan, ...]
    outside: tuple[SampleSpan, ...]
    uneven: tuple[int, ...]
    num_repeated_steps: int
    is_unfinished: bool
    unrecorded: tuple[SampleSpan, ...] = ()  # operations without a row, beside missing samples

    @property
    def is_exact(self) -> bool:
        """Each sample once, so far."""
        return not (self.missing or self.twice or self.outside)

    @property
    def summary(self) -> str:
        """epoch 0: 1,797 samples, each once"""
        of = f"{self.num_samples:,} of {words.count(self.dataset_length, 'sample')}"
        amount = of if self.num_samples != self.dataset_length else words.count(self.dataset_length, "sample")
        if self.is_exact:
            verdict = "each once" + (" so far" if self.is_unfinished else "")
        else:
            faults = [("missing", self.missing), ("done twice", self.twice), ("outside of the dataset", self.outside)]
            verdict = ", ".join(f"{sum(map(len, spans)):,} {what}" for what, spans in faults if spans)
        if self.first:
            verdict += f", from position {self.first:,} on"
        again = f" ({words.count(self.num_repeated_steps, 'step')} done again after a rollback)"
        return f"epoch {self.epoch}: {amount}, {verdict}{again if self.num_repeated_steps else ''}"

    @property
    def details(self) -> tuple[str, ...]:
        """What is wrong, a line each; nothing where all is well."""
        found = [
            f"epoch {self.epoch}: {what} are positions {_listed(spans)} of its order"
            for what, spans in (("missing", self.missing), ("twice", self.twice), ("outside", self.outside))
            if spans
        ]
        if self.unrecorded:
            found.append(
                f"epoch {self.epoch}: operations {_listed(self.unrecorded)} beside what is missing have no record; "
                "their rows may have been lost with the workers that kept them"
            )
        if self.uneven:
            found.append(
                f"epoch {self.epoch}: the batches of operations {_listed(self.uneven)} are not the global batch "
                "that the run was started with"
            )
        return tuple(found)


class Audit(msgspec.Struct, frozen=True):
    epochs: tuple[EpochAudit, ...]

    @property
    def is_exact(self) -> bool:
        return all(epoch.is_exact for epoch in self.epochs)

    @property
    def num_samples(self) -> int:
        return sum(epoch.num_samples for epoch in self.epochs)

    @property
    def num_repeated_steps(self) -> int:
        return sum(epoch.num_repeated_steps for epoch in self.epochs)

    @property
    def summary(self) -> tuple[str, ...]:
        """A line for each epoch; one for several in a row that are complete and of which there is no more to say."""
        lines = []
        for is_plain, group in groupby(self.epochs, _is_plain):
            epochs = list(group)
            if is_plain and len(epochs) > 1:
                each = words.count(epochs[0].dataset_length, "sample")
                lines.append(f"epochs {epochs[0].epoch} to {epochs[-1].epoch}: {each} in each epoch, each once")
            else:
                lines.extend(epoch.summary for epoch in epochs)
        return tuple(lines)

    @property
    def details(self) -> tuple[str, ...]:
        return tuple(line for epoch in self.epochs for line in epoch.details)


def audit(
    steps: Iterable[StepRecord], dataset_length: int, global_batch: int, *, begins_at: tuple[int, int] = (0, 0)
) -> Audit:
    """Of rows in any order, obsolete ones among them or not. `begins_at` is the cursor (epoch, position) of the first
    step that should be there: another one than (0, 0) where a run goes on from a checkpoint of another folder."""
    if dataset_length < 1 or global_batch < 1:
        raise ValueError(
            f"dataset_length={dataset_length}, global_batch={global_batch}: both are 1 or more; give those of the run"
        )
    history = history_of(steps)
    epochs: dict[int, list[StepRecord]] = {}
    for step in history:
        epochs.setdefault(step.epoch, []).append(step)
    found = []
    operation = 0  # the last one of the epochs before
    begin, last = min([begins_at[0], *epochs]), max(epochs, default=-1)
    for epoch in range(begin, last + 1):  # one that was passed over is among them: all of it is missing
        rows = epochs.get(epoch, [])
        first = begins_at[1] if epoch == begins_at[0] else 0
        audited = _audit_epoch(epoch, rows, dataset_length, global_batch, first=first, is_last=epoch == last)
        following = next((step.operation for step in history if step.epoch > epoch), None) if audited.missing else None
        unrecorded = _unrecorded(rows, audited, operation, following)
        found.append(msgspec.structs.replace(audited, unrecorded=unrecorded))
        operation = rows[-1].operation if rows else operation
    return Audit(tuple(found))


def history_of(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """The rows that count, in order: foundings never go down from one operation to the next."""
    history: list[StepRecord] = []
    founding = 0
    for step in sorted(steps, key=lambda step: step.operation):
        if step.founding >= founding:
            founding = step.founding
            history.append(step)
    return history


def _audit_epoch(
    epoch: int, steps: Sequence[StepRecord], length: int, batch: int, *, first: int, is_last: bool
) -> EpochAudit:
    covered, twice = _overlaps([SampleSpan(step.position, step.position + step.count) for step in steps if step.count])
    inside = [SampleSpan(span.start, min(span.stop, length)) for span in covered if span.start < length]
    reached = inside[-1].stop if inside else 0
    return EpochAudit(
        epoch=epoch,
        num_samples=sum(map(len, inside)),
        dataset_length=length,
        first=first,
        missing=_gaps(inside, first, reached if is_last else length),
        twice=twice,
        outside=tuple(SampleSpan(max(span.start, length), span.stop) for span in covered if span.stop > length),
        uneven=tuple(step.operation for step in steps if not _is_even(step, length, batch)),
        num_repeated_steps=sum(1 for step in steps if step.times_done > 1),
        is_unfinished=is_last and reached < length,
    )


def _overlaps(spans: list[SampleSpan]) -> tuple[list[SampleSpan], tuple[SampleSpan, ...]]:
    """The union of spans, and what is in more than one of them; both in order and merged."""
    changes: dict[int, int] = {}
    for span in spans:
        changes[span.start] = changes.get(span.start, 0) + 1
        changes[span.stop] = changes.get(span.stop, 0) - 1
    union: list[SampleSpan] = []
    twice: list[SampleSpan] = []
    depth = 0
    for here, following in pairwise(sorted(changes)):
        depth += changes[here]
        if depth > 0:
            _extend(union, here, following)
        if depth > 1:
            _extend(twice, here, following)
    return union, tuple(twice)


def _extend(spans: list[SampleSpan], start: int, stop: int) -> None:
    if spans and spans[-1].stop == start:
        start = spans.pop().start
    spans.append(SampleSpan(start, stop))


def _gaps(spans: Sequence[SampleSpan], first: int, end: int) -> tuple[SampleSpan, ...]:
    gaps = []
    for span in spans:
        if first < span.start:
            gaps.append(SampleSpan(first, span.start))
        first = max(first, span.stop)
    return tuple(gaps) if first >= end else (*gaps, SampleSpan(first, end))


def _is_even(step: StepRecord, length: int, batch: int) -> bool:
    return step.position % batch == 0 and step.count == min(batch, length - step.position)


def _unrecorded(
    steps: Sequence[StepRecord], audited: EpochAudit, before: int, following: int | None
) -> tuple[SampleSpan, ...]:
    """Where both samples and operations are left out, between the operations `before` and `following` this epoch."""
    starts = {span.start for span in audited.missing}
    ends = [(before, audited.first), *((step.operation, step.position + step.count) for step in steps)]
    nexts = [*(step.operation for step in steps), following or 0]
    return tuple(
        SampleSpan(operation + 1, after)
        for (operation, end), after in zip(ends, nexts, strict=True)
        if end in starts and after > operation + 1
    )


def _is_plain(epoch: EpochAudit) -> bool:
    return epoch.is_exact and not (epoch.is_unfinished or epoch.num_repeated_steps or epoch.first)


def _listed(items: Sequence[SampleSpan] | Sequence[int]) -> str:
    shown = ", ".join(str(item) for item in items[:MAX_SHOWN])
    return shown if len(items) <= MAX_SHOWN else f"{shown} and {len(items) - MAX_SHOWN:,} more"
