"""What must hold of a played schedule. Each check returns its violations as sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from paceline.control.exit_codes import LOST
from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader, StepRecord
from paceline.control.leases.lease_set import LeaseSet
from paceline.testing.chaos import copies, oracle
from paceline.testing.chaos.beats import WorkerBeats, run_gaps
from paceline.testing.chaos.expecting import Injury, allowed_gap_s, may_lose
from paceline.testing.chaos.schedule import Schedule
from paceline.testing.chaos.stage import ChaosRun, Past
from paceline.testing.learned import Weights
from paceline.watch.audit import audit, history_of
from paceline.watch.losses import find_lost
from paceline.wire.decoding import decode

LOST_UPDATES = "lost updates"  # the kind of events that state a loss


def violations_of(stage: ChaosRun) -> list[str]:
    """All of them; after the commands have ended."""
    losses = stated_losses(stage.folder)
    found = [*exit_codes(stage, has_lost=bool(losses)), *survivors(stage), *outages(stage)]
    # The run that went on elsewhere does not know of those.
    before = [text for past in stage.past for text in stated_losses(past.folder)]
    is_exact = not losses and not before
    if not is_exact and not may_lose(stage.schedule):
        found.append(f"an update was lost where a copy should have been left: {(losses + before)[0]}")
    finals = read_finals(stage.place / "finals")
    found += final_models(finals, is_exact=is_exact)
    found += [] if is_exact or before else closing_line(stage.folder, finals)
    for folder in stage.folders():
        found += checkpoints(folder / "checkpoints", stage.schedule, is_exact=is_exact)
    found += copies.differing(copies.read(stage.place))
    if not (stage.past and stage.schedule.mode.is_leased):  # whose rows are in no order that two databases share
        found += recorded(stage.folder, finals, stage.past)
    return found


# -- processes -------------------------------------------------------------------------------------------------------


def exit_codes(stage: ChaosRun, *, has_lost: bool = False) -> Iterator[str]:
    """A run that lost updates says so by its last code; those that end before or beside it may."""
    for command in stage.commands:
        expected = (LOST,) if has_lost and command is stage.run else (*command.expected, *[LOST] * has_lost)
        if not command.is_victim and command.code not in expected:
            tail = command.output.read_text(errors="replace").strip().splitlines()[-3:]
            wanted = " or ".join(map(str, expected))
            yield f"{command} ended with exit code {command.code}, not {wanted}: {' | '.join(tail)}"


def survivors(stage: ChaosRun) -> Iterator[str]:
    """Whoever was not hit must live to the end of the run."""
    victims = {pid for injury in stage.injuries for pid in injury.victims}
    for worker in stage.beats.look().values():
        if worker.pid in victims or not worker.steps:
            continue
        if worker.end_code is None:
            yield f"worker {worker.pid}, which no fault hit, died after {len(worker.steps)} steps"
        elif worker.end_code != 0:
            yield f"worker {worker.pid}, which no fault hit, ended with exit code {worker.end_code}"
        elif not (stage.place / "finals" / f"{worker.pid}.npz").exists():
            yield f"worker {worker.pid}, which no fault hit, left before the end of the run"


def outages(stage: ChaosRun) -> Iterator[str]:
    """No gap between two steps is longer than the faults around it explain: of the run, and of each survivor."""
    workers = stage.beats.look().values()
    victims = {pid for injury in stage.injuries for pid in injury.victims}
    for since, until in run_gaps(workers):
        yield from _too_long(stage, since, until, "the run")
    for worker in workers:
        if worker.pid not in victims:
            for since, until in worker.gaps():
                yield from _too_long(stage, since, until, f"worker {worker.pid}")


def _too_long(stage: ChaosRun, since: float, until: float, who: str) -> Iterator[str]:
    allowed_s = allowed_gap_s(stage.injuries, since, until)
    if until - since > allowed_s * stage.stretch_since(since, until):
        near = ", ".join(str(one.fault) for one in stage.injuries if one.began <= until) or "no fault"
        at_s = since - stage.began
        yield f"{who} made no step for {until - since:.1f} s at {at_s:.1f} s ({allowed_s:.1f} allowed; after {near})"


def longest_gaps(injuries: Sequence[Injury], workers: Sequence[WorkerBeats]) -> dict[str, float]:
    """The longest gap of the run for each kind of fault: a gap counts for the first fault in it, or the last before."""
    longest: dict[str, float] = {}
    for since, until in run_gaps(workers):
        inside = [one for one in injuries if since <= one.began <= until]
        before = [one for one in injuries if one.began < since]
        for injury in inside[:1] or before[-1:]:
            kind = injury.fault.kind.value
            longest[kind] = max(longest.get(kind, 0.0), until - since)
    return longest


# -- samples ---------------------------------------------------------------------------------------------------------


def stated_losses(folder: Path) -> list[str]:
    try:
        with RunReader(folder) as reader:
            return [event.text for event in reader.events() if event.kind == LOST_UPDATES]
    except JournalError:
        return []


def closing_line(folder: Path, finals: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """A run that lost updates must not say that it lost less than its models lack."""
    try:
        with RunReader(folder) as reader:
            lost = find_lost(reader)
    except JournalError as error:
        yield f"what was lost cannot be read: {error}"
        return
    for pid, final in finals.items():
        wanted = oracle.weights_at(int(final["epochs"]))
        for name in ("counts", "table"):
            found = oracle.difference(final[name], wanted)
            if found is not None and found.num_missing > (lost.samples if lost is not None else 0):
                yield f"the model of worker {pid}: {name}: {found}, but the run says that it lost {lost or 'nothing'}"


def read_finals(folder: Path) -> dict[int, dict[str, Any]]:
    found = {}
    for path in sorted(folder.glob("[0-9]*.npz")):
        with np.load(path) as file:
            found[int(path.stem)] = {name: file[name] for name in file.files}
    return found


def final_models(finals: Mapping[int, dict[str, Any]], *, is_exact: bool) -> Iterator[str]:
    if not finals:
        yield "no worker came to the end of the training"
    first = next(iter(finals.values()), {})
    for pid, final in finals.items():
        yield from (f"the model of worker {pid}: {text}" for text in _counts(final, is_exact))
        differing = [name for name in first if not np.array_equal(final[name], first[name])]
        if differing:
            yield f"the models of workers {next(iter(finals))} and {pid} differ in {', '.join(differing)}"


def _counts(final: Mapping[str, Any], is_exact: bool) -> Iterator[str]:
    epochs = int(final["epochs"])
    wanted = oracle.weights_at(epochs)
    low = wanted if is_exact else np.zeros_like(wanted)
    for name in ("counts", "table"):
        if (found := oracle.difference(final[name], low, wanted)) is not None:
            yield f"{name} after {epochs} epochs: {found}"
    updates = oracle.num_updates(float(final["pace"][0]))
    if is_exact and abs(updates - oracle.updates_at(epochs)) > oracle.TOLERANCE:
        yield f"{updates:.2f} updates with momentum, not {oracle.updates_at(epochs)}"


def checkpoints(folder: Path, schedule: Schedule, *, is_exact: bool) -> Iterator[str]:
    """Each holds what its own cursor, or its own record of leases, says."""
    from paceline.checkpoint.files import read
    from paceline.custody.names import find
    from paceline.errors import CheckpointError

    for path in [found.path for found in find(folder)]:
        try:
            contents = read(path)
        except CheckpointError as error:
            yield f"checkpoint {path.name} cannot be read: {error}"
            continue
        found = {"counts": contents.model["counts"].numpy(), **_table_of(contents.state)}
        if schedule.mode.is_leased:
            low, high = _leased_bounds(contents.state["leases"])
            where = "its record of leases"
        else:
            low = high = oracle.weights_at(contents.epoch, contents.position)
            where = f"epoch {contents.epoch}, position {contents.position}"
        for name, weights in found.items():
            if (text := oracle.difference(weights, low if is_exact else np.zeros_like(low), high)) is not None:
                yield f"{name} in checkpoint {path.name} ({where}): {text}"


def _table_of(state: Mapping[str, Any]) -> dict[str, Weights]:
    """The rows of the table in a checkpoint, as the weights of their samples."""
    packed = state.get("tables", {}).get("counted")
    if packed is None:
        return {}
    weights: Weights = np.zeros(oracle.NUM_WEIGHTS, np.float32)
    weights[packed["ids"].numpy()] = packed["rows"].numpy()[:, 0]
    return {"table": weights}


def _leased_bounds(records: Mapping[str, Any]) -> tuple[Weights, Weights]:
    """Ranges are as of different moments: what all have must be there, what none has must not."""
    sets = [LeaseSet(epoch, prefix, set(beyond)) for epoch, prefix, beyond in records.values()]
    epochs = max(one.epoch for one in sets) + 1
    low = oracle.weights_with(epochs, lambda epoch, lease: all(one.has(epoch, lease) for one in sets))
    high = oracle.weights_with(epochs, lambda epoch, lease: any(one.has(epoch, lease) for one in sets))
    return low, high


def recorded(folder: Path, finals: Mapping[int, dict[str, Any]], past: Sequence[Past] = ()) -> Iterator[str]:
    """What run.db says of the samples agrees with what the models say. A run that went on, on another host, from what
    that host held has its earlier steps in the run.db of the lost host, the last of them perhaps in the checkpoint."""
    try:
        before = [row for one in past for row in _left_behind(one)]
        with RunReader(folder) as reader:
            rows, status = history_of(reader.steps()), reader.status().status
    except JournalError as error:
        yield f"run.db cannot be read: {error}"
        return
    if status != "ended":
        yield f"run.db says that the run is {status}, not ended"
    first = min((row.operation for row in rows), default=0)
    rows = [*(row for row in before if row.operation < first), *rows]
    found = audit(rows, oracle.LENGTH, oracle.GLOBAL_BATCH)
    wrong = [one for one in found.epochs if not one.is_exact]
    if wrong:
        yield f"run.db: {'; '.join(text for one in wrong for text in one.details)}"
    epochs = {int(final["epochs"]) for final in finals.values()}
    done = {len(found.epochs)} if not found.epochs or not found.epochs[-1].is_unfinished else {len(found.epochs) - 1}
    if finals and epochs != done:
        yield f"run.db has {max(done)} epochs, the workers {', '.join(map(str, sorted(epochs)))}"


def _left_behind(past: Past) -> list[StepRecord]:
    """The steps of a lost host: those that it recorded, and those of which only the checkpoint knows."""
    from paceline.checkpoint.files import read
    from paceline.control.messages.progress import StepRow
    from paceline.train.saving import UNRECORDED

    with RunReader(past.folder) as reader:
        rows = {row.operation: msgspec.structs.replace(row, founding=0) for row in history_of(reader.steps())}
    for row in decode(read(past.checkpoint).state[UNRECORDED], tuple[StepRow, ...]):
        values = {name: getattr(row, name, 0) for name in StepRecord.__struct_fields__}
        rows.setdefault(row.operation, StepRecord(**{**values, "founding": 0, "times_done": 1}))
    return list(rows.values())
