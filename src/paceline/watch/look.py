"""What one look at a run finds: the same figures for the table, the JSON, the live display and the plain lines.

What the members have in common is in the run's facts; three figures are taken from them. A run that does not have one
of them is shown without what follows from it.

    dataset_length   samples of an epoch; else the number that "the data" begins with, as in "1797 samples, ..."
    global_batch     samples of a step
    num_epochs       epochs that are to be done
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from paceline.control.journal.folder import LOCK_FILE
from paceline.control.journal.journal import MemberRow
from paceline.control.journal.reader import EventRow, PlanRow, RunReader, RunStatus, StepRecord
from paceline.watch.history import foundings_of
from paceline.watch.names import Names
from paceline.watch.newcomers import Newcomer, newcomers_of

OVER = ("ended", "failed")
STILL = (*OVER, "interrupted")
KEPT_STEPS = 512
RATE_S = 10.0  # over how long a time the speed is taken
QUIET_S = 5.0  # without news, before a run is called quiet
LAST_EVENTS = 20


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """`epoch` and `position` are the cursor, None before the first step; 0 stands for a figure that is not known.
    `step` counts the steps of the history, `operation` is the number of the last one in the run's sequence.
    `members` are workers and servers, those that live first, by rank; `sharing` is the last change of shares, `names`
    what members are called, `newcomers` who has not joined yet."""

    folder: Path
    now: float
    name: str
    state: str
    reason: str
    started: float
    ended: float
    generation: int
    epoch: int | None
    position: int | None
    step: int
    operation: int
    loss: float | None
    samples_per_s: float
    last_step: float
    dataset_length: int
    global_batch: int
    num_epochs: int
    is_deserted: bool
    members: tuple[MemberRow, ...]
    events: tuple[EventRow, ...]
    sharing: EventRow | None = None
    names: Names = Names()
    newcomers: tuple[Newcomer, ...] = ()

    @property
    def workers(self) -> tuple[MemberRow, ...]:
        """Also those that are gone."""
        return tuple(member for member in self.members if not member.is_server)

    @property
    def living_workers(self) -> tuple[MemberRow, ...]:
        return tuple(member for member in self.workers if not member.fate)

    @property
    def servers(self) -> tuple[MemberRow, ...]:
        """Also those that are gone."""
        return tuple(member for member in self.members if member.is_server)

    @property
    def living_servers(self) -> tuple[MemberRow, ...]:
        return tuple(member for member in self.servers if not member.fate)

    @property
    def elapsed_s(self) -> float:
        if not self.started:
            return 0.0
        if self.state in OVER and self.ended > self.last_step:  # else it is that of the session before
            return max(0.0, self.ended - self.started)
        end = max(self.last_step, *(event.time for event in self.events), 0.0) if self.state in STILL else self.now
        return max(0.0, end - self.started)

    @property
    def fraction(self) -> float | None:
        """How much of the epoch is done."""
        if not self.dataset_length or self.position is None:
            return None
        return min(1.0, self.position / self.dataset_length)

    @property
    def remaining_s(self) -> float | None:
        """Until all epochs are done, or this one where it is not known how many there are."""
        if self.state in STILL or not self.dataset_length or not self.samples_per_s > 0:
            return None
        if self.epoch is None or self.position is None:
            return None
        further_epochs = max(0, self.num_epochs - self.epoch - 1)
        return max(0, further_epochs * self.dataset_length + self.dataset_length - self.position) / self.samples_per_s

    @property
    def quiet_s(self) -> float:
        """How long a run that should make steps has made none; 0 while that is no news."""
        if self.state not in ("running", "fencing") or not self.last_step:
            return 0.0
        quiet_s = self.now - self.last_step
        return quiet_s if quiet_s > QUIET_S else 0.0


class RecentSteps:
    """The last steps of the history, read piece by piece: every row once, but for those that a rollback takes back."""

    def __init__(self) -> None:
        self._rows: deque[StepRecord] = deque(maxlen=KEPT_STEPS)
        self._founding = 0

    def update(self, reader: RunReader, plans: Sequence[PlanRow], num_steps: int) -> list[StepRecord]:
        foundings = foundings_of(plans)
        newest, base = (foundings[-1].generation, foundings[-1].base) if foundings else (0, -1)
        if newest != self._founding:
            self._founding = newest
            self._rows = deque((row for row in self._rows if row.operation <= base), maxlen=KEPT_STEPS)
        if self._rows:
            since = self._rows[-1].operation
        elif len(foundings) > 1:
            since = base  # rows of an older founding may lie above
        else:
            since = num_steps - KEPT_STEPS  # every step has an operation of its own: these are the last ones, and a few
        found = [row for row in reader.steps(since) if row.founding >= newest or row.operation <= base]
        if not self._rows and not found and len(foundings) > 1:
            found = [row for row in reader.steps(base - KEPT_STEPS) if row.operation <= base]
        self._rows.extend(found)
        return list(self._rows)


def look_at(reader: RunReader, now: float) -> Look:
    """One look at all of it."""
    status, plans = reader.status(), reader.plans()
    steps = RecentSteps().update(reader, plans, status.num_steps)
    events = reader.events()[-LAST_EVENTS:]
    return describe(
        reader.path.parent, status, reader.members(), steps, events, now, sharing=reader.last_event("shares")
    )


def describe(
    folder: Path,
    status: RunStatus,
    members: Iterable[MemberRow],
    steps: Sequence[StepRecord],
    events: Sequence[EventRow],
    now: float,
    *,
    sharing: EventRow | None = None,
) -> Look:
    ordered = sorted(members, key=lambda member: (bool(member.fate), member.rank < 0, member.rank, member.joined))
    last = steps[-1] if steps else None
    sizes = Figures.of(status)
    length, batch = sizes.dataset_length, sizes.global_batch
    last_step = last.time if last is not None else 0.0
    news = max([last_step, *(member.updated for member in ordered), *(event.time for event in events)], default=0.0)
    position = last.position + last.count if last is not None else None
    step = status.num_steps
    if last is not None and position is not None and length and batch:
        # Where it can be told from the cursor: rows that a rollback took back are counted by the database too.
        step = last.epoch * -(-length // batch) + -(-position // batch)
    is_deserted = status.status not in STILL and now - news > QUIET_S and coordinator_is_gone(folder)
    starting = () if status.status in STILL or is_deserted else status.starting
    return Look(
        folder=folder,
        now=now,
        name=status.name or folder.name,
        state=status.status or "not started",
        reason=status.reason,
        started=status.started,
        ended=status.ended,
        generation=max([0, *(member.generation for member in ordered if not member.fate)])
        or (last.generation if last is not None else 0),
        epoch=last.epoch if last is not None else None,
        position=position,
        step=step,
        operation=last.operation if last is not None else -1,
        loss=last.loss if last is not None else None,
        samples_per_s=speed(steps),
        last_step=last_step,
        dataset_length=length,
        global_batch=batch,
        num_epochs=sizes.num_epochs,
        is_deserted=is_deserted,
        members=tuple(ordered),
        events=tuple(events),
        sharing=sharing,
        names=Names.of(folder, ordered),
        newcomers=newcomers_of(starting, ordered, folder),
    )


def speed(steps: Sequence[StepRecord]) -> float:
    """Samples a second over the last steps; 0 where there is none. Rows come in lots, all of one time, so the first
    lot only says when the others began."""
    if not steps:
        return 0.0
    recent = [step for step in steps if step.time >= steps[-1].time - RATE_S]
    first, last = min(step.time for step in recent), steps[-1].time
    if last > first:
        return sum(step.count for step in recent if step.time > first) / (last - first)
    spent_s = sum(step.seconds for step in recent)
    return sum(step.count for step in recent) / spent_s if spent_s > 0 else 0.0


def coordinator_is_gone(folder: Path) -> bool:
    """Whether the process that the folder's lock names has ended. Where that cannot be told it is not said."""
    try:
        pid = int((folder / LOCK_FILE).read_text())
    except (OSError, ValueError):
        return False
    return not Path(f"/proc/{pid}").exists()


class Figures(msgspec.Struct, frozen=True):
    """What the facts of a run say about its size; 0 where they say nothing."""

    dataset_length: int
    global_batch: int
    num_epochs: int

    @classmethod
    def of(cls, status: RunStatus) -> Figures:
        facts = status.facts
        length = _leading(facts.get("dataset_length", "")) or _leading(facts.get("the data", ""))
        return cls(length, _leading(facts.get("global_batch", "")), _leading(facts.get("num_epochs", "")))


def _leading(text: str) -> int:
    """The number that a text begins with."""
    found = re.match(r"[0-9]{1,18}(?![0-9])", text)
    return int(found[0]) if found else 0
