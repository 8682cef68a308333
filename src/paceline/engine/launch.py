"""`launch`: a run of a function, from a script or a notebook."""

from __future__ import annotations

import logging
import os
import pickle
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.engine import folders, running, speeds, task, worker
from paceline.engine.events import RunOutcome, RunResult
from paceline.engine.local import Attached, Job
from paceline.errors import LaunchFailed
from paceline.wire.descriptors import Fd

logger = logging.getLogger("paceline.engine")


def launch(
    function: Callable[..., Any],
    *arguments: Any,
    workers: int = 4,
    name: str = "",
    folder: str | Path = "runs",
    restarts: int = 3,
    strict: bool = False,
    shares: str = speeds.AUTO,
    drop_stragglers: bool = False,
    servers: int = 0,
    replicas: int = 1,
    ranges: str = speeds.AUTO,
) -> list[Any]:
    """Run `function(*arguments)` in `workers` processes of this machine, as `paceline run -n` runs a script, and return
    what each returned, in order. What they print is printed here.

    >>> if __name__ == "__main__":
    ...     results = paceline.launch(train, 0.1, workers=4)

    `shares` is "auto", "equal", or fixed ones: "4:2:1". `servers` processes more hold parameters, each on `replicas` of
    them; `ranges` is "auto", or "fixed" to move none because of load.

    If the run fails, its root cause is raised: the worker's own exception, with its traceback as a note, where it has
    one that can travel, else `LaunchFailed`. A `ValueError` says before anything is started that the function cannot be
    sent to other processes. A worker that was lost for good while the others went on, or that raised, returns None, and
    the log says what it raised. A run that ended without it, that lost updates with the last copy of a range, or whose
    last state could not be saved, says so on stderr; with `strict` that is a `LaunchFailed`."""
    if worker.IMPORTING_VARIABLE in os.environ:
        raise RuntimeError(
            "launch was called while a worker imports the main script; put the call under "
            "`if __name__ == '__main__':`, so that only the first process makes it"
        )
    hosting = running.Hosting(
        workers=workers,
        restarts=restarts,
        strict=strict,
        shares=speeds.parse_shares(shares),
        drop_stragglers=drop_stragglers,
        servers=servers,
        replicas=replicas,
        by_load=speeds.parse_ranges(ranges),
    )
    hosting.settings()
    packed, root = task.pack(function, arguments), Path(folder)
    place = folders.claim(root, name or folders.new_name(root, getattr(function, "__name__", "launch")))
    return _run(hosting, packed, place)


def _run(hosting: running.Hosting, packed: bytes, place: folders.ClaimedFolder) -> list[Any]:
    results = LaunchResults(packed)
    try:
        job = Job(command=(worker.__file__,), workers=hosting.workers, run=place.name)
        with running.Lifetime(place) as life:
            outcome = life.host(hosting, running.local_engine(job, place.logs, results.attach))
            is_well = outcome.result in (RunResult.ENDED, RunResult.INTERRUPTED)
            explanation = [] if is_well else life.explanation(outcome)
            shortfall = life.shortfall()
        if outcome.result is RunResult.ENDED and not hosting.strict:
            running.report(outcome, explanation, place, shortfall=shortfall)
        missing = shortfall.lines if hosting.strict else []
        return _conclude(outcome, explanation, results, place, hosting.workers, missing)
    finally:
        results.close()
        place.close()


class LaunchResults:
    """The task, and a place for what each worker returns or raises; a worker that is started again gets a new one."""

    def __init__(self, packed: bytes) -> None:
        self._task = Fd(os.memfd_create("paceline-task"))
        worker.write(self._task.fileno(), packed)
        self._places: dict[int, Fd] = {}

    def attach(self, slot: int) -> Attached:
        if slot in self._places:
            self._places[slot].close()
        self._places[slot] = Fd(os.memfd_create("paceline-result"))
        result = self._places[slot].fileno()
        return Attached(descriptors={worker.TASK_VARIABLE: self._task.fileno(), worker.RESULT_VARIABLE: result})

    def take(self) -> dict[int, tuple[Any, ...]]:
        """What came from each slot that left anything."""
        found = {slot: worker.read(place.fileno()) for slot, place in sorted(self._places.items())}
        return {slot: pickle.loads(data) for slot, data in found.items() if data}

    def close(self) -> None:
        for place in [self._task, *self._places.values()]:
            place.close()


def _value(slot: int, left: tuple[Any, ...] | None) -> Any:
    """What a worker returned. One that raised, because it was refused for instance, was lost while the others went on:
    what it raised is no value."""
    if left is None or left[0] == worker.RETURNED:
        return left[1] if left is not None else None
    logger.warning("w%d returned nothing, it raised: %s", slot, left[2].splitlines()[-1] if left[2] else left[1])
    return None


def _conclude(
    outcome: RunOutcome,
    explanation: list[str],
    results: LaunchResults,
    place: folders.ClaimedFolder,
    workers: int,
    lacks: Sequence[str] = (),
) -> list[Any]:
    """`lacks` is what the run must not lack, and does."""
    found = results.take()
    if outcome.result is RunResult.ENDED and outcome.code:
        raise LaunchFailed(f"the run {place.name} {running.without(outcome.missing)}; logs: {place.logs}")
    if outcome.result is RunResult.ENDED and lacks:
        raise LaunchFailed(f"the run {place.name} has ended, but {'; '.join(lacks)}; logs: {place.logs}")
    if outcome.result is RunResult.ENDED:
        return [_value(slot, found.get(slot)) for slot in range(workers)]
    if outcome.result is RunResult.INTERRUPTED:
        if outcome.code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        raise LaunchFailed(f"the run {place.name} was asked to end by {signal.Signals(outcome.code - 128).name}")
    for slot, (kind, *raised) in found.items():
        if kind != worker.RAISED or raised[0] is None:
            continue
        error, text = raised
        # Others may have failed because the run did; the coordinator's reason is the first one's own traceback.
        if slot == outcome.slot or (outcome.slot < 0 and text in outcome.reason):
            error.add_note(f"raised by w{slot} of the run {place.name}; logs: {place.logs}\n{text}")
            raise error
    is_later = outcome.result is RunResult.FAILED_LATER
    what = running.later(place.name) if is_later else f"the run {place.name} failed"
    raise LaunchFailed("\n".join([what, *explanation, f"logs: {place.logs}"]))
