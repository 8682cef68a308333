"""The last lines of a run: what was trained, who came and went, what stood still for how long, whether every sample
was committed once, and where things are. For a failed run the root cause comes last, where the eye is.

Times of outages come from when steps were recorded, which is within a second of when they were done.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from paceline.control.journal.reader import EventRow, MemberRow, PlanRow, RunReader, RunStatus, StepRecord
from paceline.control.messages.plan import PlanStart
from paceline.custody import names
from paceline.watch import words
from paceline.watch.audit import audit
from paceline.watch.history import metrics, standing_steps
from paceline.watch.live import event_text
from paceline.watch.look import STILL, Figures
from paceline.watch.losses import find_shortfall

LOGS = "logs"  # a folder of a run
LOSSES = ("dead", "failed", "evicted")
MAX_NAMED = 10


class Outage(msgspec.Struct, frozen=True):
    """From the last step before a loss to the first one after it; `until` is 0 where there was none. `generation` is
    that of the plan that ended it."""

    generation: int
    since: float
    until: float
    causes: tuple[EventRow, ...]
    founded_from: int | None = None  # the operation, where the run had to go back to a checkpoint

    def __str__(self) -> str:
        causes = "; ".join(event_text(event) for event in self.causes[:3]) or "the members lost touch"
        more = f" and {len(self.causes) - 3} more" if len(self.causes) > 3 else ""
        took = f"{words.duration(self.until - self.since)} without a step" if self.until else "no step since"
        again = "" if self.founded_from is None else f", founded again from operation {self.founded_from}"
        return f"{words.clock(self.since)} {took}{again} ({causes}{more})"


def summarise(reader: RunReader) -> list[str]:
    """A line each, without an end of line; the last one of a failed run is its root cause, which may be several."""
    status, plans, members = reader.status(), reader.plans(), reader.members()
    steps = standing_steps(reader.steps(), plans)
    folder = reader.path.parent
    lines = [
        _headline(status, folder, steps),
        *_trained(reader, status, steps),
        *_members(members, plans, status.reason),
    ]
    servers = {member.member for member in members if member.is_server}
    # A server that is lost ends no plan.
    events = [event for event in reader.events() if event.member not in servers]
    lines += _outages(find_outages(steps, plans, events))
    lines += _audit(status, steps, plans)
    lines += find_shortfall(reader).lines
    lines += _places(folder)
    return [words.clean(line).replace("\n", " ") for line in lines] + _cause(status)


def find_outages(steps: Sequence[StepRecord], plans: Sequence[PlanRow], events: Sequence[EventRow]) -> list[Outage]:
    """One for each plan that was made because the one before it could not go on. Pure."""
    generations = [step.generation for step in steps]  # never goes down in one history
    found: list[Outage] = []
    for previous, plan in pairwise(plans):
        at = bisect_left(generations, plan.generation)
        if plan.start == PlanStart.SWITCH.value or at == 0:
            continue
        causes = tuple(event for event in events if event.kind in LOSSES and previous.time < event.time <= plan.time)
        is_founded = plan.start == PlanStart.FOUND.value
        since = _began(steps[at - 1].time, causes, is_founded)
        until = steps[at].time if at < len(steps) else 0.0
        if found and found[-1].until == until:  # a second loss before any step: one outage
            earlier = found.pop()
            since, causes = min(earlier.since, since), earlier.causes + causes
        found.append(Outage(plan.generation, since, until, causes, plan.base if is_founded else None))
    return found


def _began(last_step: float, causes: Sequence[EventRow], is_founded: bool) -> float:
    noticed = [event.time for event in causes]
    if is_founded and noticed:
        return min(noticed)  # the steps after the checkpoint are not in the history, so the last one is too early
    # The rows of a main worker that died are recorded by the next one, later than the death.
    return min([last_step, *noticed])


def _headline(status: RunStatus, folder: Path, steps: Sequence[StepRecord]) -> str:
    name, state = status.name or folder.name, status.status or "not started"
    end = status.ended or (steps[-1].time if steps else 0.0)
    took = f" after {words.duration(end - status.started)}" if status.started and end and state in STILL else ""
    reason = f": {status.reason}" if status.reason and state != "failed" else ""
    return f"run {name}: {state}{took}{reason}"


def _trained(reader: RunReader, status: RunStatus, steps: Sequence[StepRecord]) -> list[str]:
    if not steps:
        return ["trained: nothing; no step was done"]
    length = Figures.of(status).dataset_length
    last = steps[-1]
    done = len({step.epoch for step in steps})
    is_partial = bool(length) and last.position + last.count < length
    epochs = words.count(done, "epoch") + (" (the last one in part)" if is_partial else "")
    samples = words.count(sum(step.count for step in steps), "sample")
    lines = [
        f"trained: {epochs}, {words.count(len(steps), 'step')}, {samples}; the last loss is {words.number(last.loss)}"
    ]
    scores = [f"{name} {words.number(series.values[-1])}" for name, series in sorted(metrics(reader).items())]
    if scores:
        lines.append(f"metrics: {', '.join(scores)}")
    return lines


def _members(members: Sequence[MemberRow], plans: Sequence[PlanRow], reason: str) -> list[str]:
    if not members:
        return ["members: none came"]
    final = set(plans[-1].members) if plans else set()
    lost = [member for member in members if member.fate and member.fate != "released"]
    released = [member for member in members if member.fate == "released"]
    left = [member for member in released if not member.is_server and plans and member.member not in final]
    left += [member for member in released if member.is_server and member.reason != reason]  # those let go at the end
    parts = [f"{_counted(members)} took part"]
    parts += [f"{len(left):,} left before the end"] if left else []
    parts += [f"{len(lost):,} lost"] if lost else []
    lines = [f"members: {', '.join(parts)}"]
    return lines + _first(
        [f"  {words.short(row.member)} on {row.host}: {row.fate}, {words.one_line(row.reason, 200)}" for row in lost]
    )


def _counted(members: Sequence[MemberRow]) -> str:
    num_servers = sum(member.is_server for member in members)
    if not num_servers:
        return words.count(len(members), "member")
    return f"{words.count(len(members) - num_servers, 'worker')} and {words.count(num_servers, 'server')}"


def _outages(outages: Sequence[Outage]) -> list[str]:
    if not outages:
        return []
    total_s = sum(outage.until - outage.since for outage in outages if outage.until)
    headline = f"outages: {len(outages):,}, {words.duration(total_s)} in all"
    return [headline, *_first([f"  {outage}" for outage in outages])]


def _audit(status: RunStatus, steps: Sequence[StepRecord], plans: Sequence[PlanRow]) -> list[str]:
    sizes = Figures.of(status)
    if not steps:
        return []
    if not sizes.dataset_length or not sizes.global_batch:
        return ["samples: not audited, the run did not say how long its dataset and its global batch are"]
    # Founded from a checkpoint the first time: what came before it is recorded elsewhere.
    is_continued = bool(plans) and plans[0].base > 0
    begins_at = (steps[0].epoch, steps[0].position) if is_continued else (0, 0)
    result = audit(steps, sizes.dataset_length, sizes.global_batch, begins_at=begins_at)
    epochs = [f"samples: {line}" for line in result.summary]
    return _first(epochs, 2 * MAX_NAMED) + _first([f"  {line}" for line in result.details])


def _places(folder: Path) -> list[str]:
    lines = []
    checkpoints = folder / names.FOLDER
    with contextlib.suppress(OSError):
        if found := names.find(checkpoints):
            lines.append(f"checkpoints: {checkpoints} ({len(found):,}, the newest is {found[0].path.name})")
    if (folder / LOGS).is_dir():
        lines.append(f"logs: {folder / LOGS}")
    return lines


def _cause(status: RunStatus) -> list[str]:
    """All of its lines: the last ones of a traceback say what it was."""
    if status.status != "failed":
        return []
    text = words.clean(status.reason).rstrip() or "the run did not say why it failed; see its logs"
    first, *rest = text.splitlines()
    return [f"failed: {first}", *rest]


def _first(lines: list[str], most: int = MAX_NAMED) -> list[str]:
    return lines if len(lines) <= most else [*lines[:most], f"  ... and {len(lines) - most:,} more"]
