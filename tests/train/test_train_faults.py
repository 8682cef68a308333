"""Real processes are killed, stopped, cut off and asked to leave at bad moments; the others go on."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from trainers import BATCH, LENGTH, check_alike, check_samples, train, train_with_held_transfers

from paceline.control.coordinator import Settings
from paceline.testing.rehearsal import Died, Rehearsal, say, worker_number
from paceline.train.saving import Checkpoints
from paceline.train.session import Session

STEPS = -(-LENGTH // BATCH)
QUICK = Settings(wanted=3, fewest=1, silence_s=1.0)


def steps_of(run: Rehearsal, number: int) -> int:
    """The last step that a worker has said."""
    said = [one[0] for one in run.said(number) if isinstance(one[0], int)]
    return said[-1] if said else 0


def wait_for_steps(run: Rehearsal, numbers: Sequence[int], steps: int) -> None:
    run.wait_for(lambda: all(steps_of(run, number) >= steps for number in numbers))


def check_record(run: Rehearsal, steps: int, since: int = 0) -> None:
    """run.db has a row for every step after the first ones, and they are the whole of every epoch."""
    with run.reader() as reader:
        rows = reader.steps()
    covered = [(row.epoch, row.position, row.count) for row in rows][since - steps :]
    wanted = [divmod(number, STEPS) for number in range(since, steps)]
    assert covered == [(epoch, at * BATCH, min(BATCH, LENGTH - at * BATCH)) for epoch, at in wanted]


def kill_again_and_again(folder: Path, times: int, seed: int) -> None:
    enough = folder / "enough"
    dice = random.Random(seed)
    with Rehearsal(train, 0, 0.005, str(enough), workers=3, folder=folder) as run:
        living = [0, 1, 2]
        for _ in range(times):
            there = max(steps_of(run, number) for number in living)
            wait_for_steps(run, living, there + dice.randint(1, 9))
            victim = dice.choice(living[1:])  # the first one stays, so that a process of the beginning sees the end
            run.kill(victim)
            living.remove(victim)
            run.add()
            living.append(len(run.workers) - 1)
        there = max(steps_of(run, number) for number in living)
        wait_for_steps(run, living, there + 3)
        enough.touch()
        results = run.finish(living)
        assert results[0]["pid"] == run.workers[0].pid
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        check_record(run, results[0]["steps"])


def test_a_worker_is_killed_ten_times(tmp_path: Path) -> None:
    kill_again_and_again(tmp_path, 10, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_is_killed_many_times(tmp_path: Path, seed: int) -> None:
    kill_again_and_again(tmp_path, 40, seed)


def test_two_killed_at_once_then_all_but_one_then_the_run_grows_again(tmp_path: Path) -> None:
    """The main worker is among the first two: another one becomes main, and checkpoints go on."""
    enough = tmp_path / "enough"
    function = partial(train, checkpoints=Checkpoints(every_s=None, every_steps=4))
    with Rehearsal(function, 0, 0.005, str(enough), workers=5, folder=tmp_path) as run:
        wait_for_steps(run, range(5), 3)
        first, second, *others = run.members()
        run.kill(first)
        run.kill(second)
        there = steps_of(run, others[0])
        wait_for_steps(run, others, there + 5)
        for number in others[:-1]:
            run.kill(number)
        last = others[-1]
        wait_for_steps(run, [last], steps_of(run, last) + 5)
        assert run.said(last)[-1][1] == 1
        run.add()
        wait_for_steps(run, [5], 5)
        enough.touch()
        results = run.finish([last, 5])
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        check_record(run, results[0]["steps"])
        kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
        assert kept, "checkpoints went on"


def test_a_stopped_worker_is_evicted_and_nobody_is_disturbed(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(train, 0, 0.005, str(enough), workers=3, folder=tmp_path, settings=QUICK) as run:
        wait_for_steps(run, range(3), 3)
        run.stop(1)
        there = steps_of(run, 0)
        wait_for_steps(run, [0, 2], there + 5)
        run.resume(1)
        (stopped,) = run.finish([1])
        assert isinstance(stopped, Died)
        assert stopped.code != 0
        wait_for_steps(run, [0, 2], steps_of(run, 0) + 5)
        enough.touch()
        results = run.finish([0, 2])
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        assert len(run.events("evicted")) == 1


def be_slow(session: Session) -> None:
    """Worker 1 sleeps once and holds the interpreter's lock once, each for longer than silence is suffered."""
    if worker_number() == 1 and session.steps == 4:
        time.sleep(2.5)
    if worker_number() == 1 and session.steps == 6:
        began = time.monotonic()
        while time.monotonic() - began < 2.5:
            sum(range(100_000_000))  # one call of C, in which no other thread runs


def test_a_slow_worker_is_not_a_dead_one(tmp_path: Path) -> None:
    function = partial(train, in_loss=be_slow)
    with Rehearsal(function, 1, 0.0, workers=3, folder=tmp_path, settings=QUICK) as run:
        results = run.finish()
        check_alike(results)
        check_samples(results, 1)
        assert not run.events("evicted")


def test_the_coordinator_dies_and_comes_back(tmp_path: Path) -> None:
    """Training goes on without it; a death after its return, and one during its absence, are recovered."""
    enough = tmp_path / "enough"
    with Rehearsal(train, 0, 0.005, str(enough), workers=4, folder=tmp_path) as run:
        wait_for_steps(run, range(4), 3)
        run.kill_coordinator()
        wait_for_steps(run, range(4), steps_of(run, 0) + 10)
        run.start_coordinator()
        wait_for_steps(run, range(4), steps_of(run, 0) + 3)
        run.kill(3)
        wait_for_steps(run, range(3), steps_of(run, 0) + 5)
        run.kill_coordinator()
        wait_for_steps(run, range(3), steps_of(run, 0) + 3)
        run.kill(2)
        run.finish([2])
        run.start_coordinator()
        wait_for_steps(run, range(2), steps_of(run, 0) + 5)
        enough.touch()
        results = run.finish([0, 1])
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        check_record(run, results[0]["steps"])


def who_gives(run: Rehearsal, beside: Sequence[int] = ()) -> int:
    """The worker that is in the middle of sending the state."""

    def givers() -> list[int]:
        numbers = [number for number in range(len(run.workers)) if number not in beside]
        return [number for number in numbers if run.said(number)[-1:] and run.said(number)[-1][0] == "giving"]

    run.wait_for(givers)
    return givers()[0]


@pytest.mark.parametrize("victim", ["donor", "newcomer", "third"])
def test_a_death_during_a_join(tmp_path: Path, victim: str) -> None:
    enough, go_on, founded = tmp_path / "enough", tmp_path / "go on", tmp_path / "founded"
    go_on.touch()  # the first state is sent without a pause
    function = partial(train_with_held_transfers, str(go_on))
    with Rehearsal(function, 0, 0.0, str(enough), workers=3, folder=tmp_path) as run:
        wait_for_steps(run, range(3), 2)
        go_on.rename(founded)
        run.add()
        donor = who_gives(run)
        there = steps_of(run, donor)
        dead = {"donor": donor, "newcomer": 3, "third": (donor + 1) % 3}[victim]
        run.kill(dead)
        run.finish([dead])
        founded.rename(go_on)
        living = [number for number in range(4) if number != dead]
        wait_for_steps(run, living, there + 5)
        enough.touch()
        results = run.finish(living)
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        check_record(run, results[0]["steps"])


def test_two_join_at_once_and_one_right_before_the_end(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(train, 0, 0.005, str(enough), workers=1, folder=tmp_path) as run:
        wait_for_steps(run, [0], 2)
        run.add()
        run.add()
        wait_for_steps(run, [1, 2], 3)
        enough.touch()
        run.add()
        results = run.finish()
        # The last one came in time for some steps, or was told that there is nothing left to do.
        results = [result for result in results if result != Died(0)]
        assert len(results) >= 3
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS)


def test_all_die_and_the_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    function = partial(train, checkpoints=Checkpoints(every_s=None, every_steps=3))
    with Rehearsal(function, 0, 0.005, str(enough), workers=2, folder=tmp_path) as run:
        wait_for_steps(run, range(2), 8)
        run.wait_for(lambda: [path for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()])
        for number in range(2):
            run.kill(number)
        for _ in range(2):
            run.add()
        wait_for_steps(run, [2, 3], 14)
        enough.touch()
        results = run.finish([2, 3])
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        since = results[0]["committed"][0][1] - 1
        assert since >= 3, "it did not start anew"
        assert since % 3 == 0
        # What the dead had not said yet of earlier steps is not known any more.
        check_record(run, results[0]["steps"], since)
        assert "are done again" in run.events("rollback")[0]


def test_a_signal_lets_one_worker_leave_and_the_last_one_save(tmp_path: Path) -> None:
    """And a later run goes on from there, to the same bits as one that was never interrupted."""
    straight, folder = tmp_path / "straight", tmp_path / "interrupted"
    straight.mkdir()
    folder.mkdir()
    with Rehearsal(train, 3, 0.0, workers=1, folder=straight) as run:
        (expected,) = run.finish()
    settings = Settings(wanted=1, fewest=1)
    with Rehearsal(train, 3, 0.02, workers=1, folder=folder, settings=settings) as run:
        wait_for_steps(run, [0], 4)
        run.terminate(0)
        assert run.finish() == [Died(0)], run.log(0)
        stopped = steps_of(run, 0)
        assert stopped < 3 * STEPS
        run.wait_for(lambda: run.coordinator.poll() is not None)
    with Rehearsal(train, 3, 0.0, workers=1, folder=folder, settings=settings) as run:
        (resumed,) = run.finish()
        assert resumed["committed"][0][1] == stopped + 1
        assert [resumed[what] for what in ("digest", "steps", "lr", "state")] == [
            expected[what] for what in ("digest", "steps", "lr", "state")
        ]


def test_workers_leave_by_a_signal_by_a_command_and_all_together(tmp_path: Path) -> None:
    with Rehearsal(train, 1000, 0.01, workers=4, folder=tmp_path) as run:
        wait_for_steps(run, range(4), 2)
        run.terminate(1)
        assert run.finish([1]) == [Died(0)], run.log(1)
        run.ask("drain", run.members()[2])
        assert run.finish([2]) == [Died(0)], run.log(2)
        wait_for_steps(run, [0, 3], steps_of(run, 0) + 5)
        assert run.said(0)[-1][1] == 2
        run.ask("halt", "a person had enough")
        assert run.finish([0, 3]) == [Died(0), Died(0)], run.log(0)
        assert steps_of(run, 0) == steps_of(run, 3)
        run.wait_for(lambda: run.coordinator.poll() is not None)
        assert run.coordinator.returncode == 0
        with run.reader() as reader:
            assert (reader.status().status, reader.status().reason) == ("ended", "a person had enough")
        check_record(run, steps_of(run, 0))
        assert not run.events("dead")
