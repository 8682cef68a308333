"""The coordinator's process is stopped for longer than silence is suffered; nobody is taken for dead when it wakes."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from paceline.control.machines.coordinator_events import RunSettings
from paceline.testing.rehearsal import Rehearsal
from tests.train.trainers import BATCH, LENGTH, check_alike, check_samples, train

STEPS = -(-LENGTH // BATCH)
SILENCE_S = 1.0


def pause(run: Rehearsal, victim: int, seconds: float) -> None:
    """The coordinator and a worker stand still together, as when their host swaps or is suspended."""
    run.stop(victim)
    run.coordinator.send_signal(signal.SIGSTOP)
    time.sleep(seconds)  # what is tested is a pause of so long
    run.coordinator.send_signal(signal.SIGCONT)
    run.resume(victim)


def test_a_coordinator_that_stood_still_takes_nobody_for_dead(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    settings = RunSettings(wanted=3, fewest=1, silence_s=SILENCE_S)
    with Rehearsal(train, 0, 0.01, str(enough), workers=3, folder=tmp_path, settings=settings) as run:
        run.wait_for(lambda: all(run.said(number) for number in range(3)))
        for round_ in range(3):
            pause(run, round_ % 3, (1.1 + 0.3 * round_) * SILENCE_S)
            there = max(len(run.said(number)) for number in range(3))
            run.wait_for(lambda: min(len(run.said(number)) for number in range(3)) > there + 2)  # noqa: B023
        enough.touch()
        results = run.finish()
        assert not run.events("evicted") + run.events("dead"), run.events("evicted") + run.events("dead")
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS)
        assert len(run.events("plan")) == 1
