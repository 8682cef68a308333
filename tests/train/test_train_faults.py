"""Real processes are killed, stopped, cut off and asked to leave at bad moments; the others go on."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import find, newest_good
from paceline.control.exit_codes import START_AGAIN
from paceline.control.machines.coordinator_events import RunSettings
from paceline.custody.partial import NAMING
from paceline.testing import faults
from paceline.testing.faults import StepFault
from paceline.testing.rehearsal import Died, Rehearsal, say, worker_number
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.trainers import (
    BATCH,
    LENGTH,
    check_alike,
    check_samples,
    train,
    train_with_a_laggard,
    train_with_held_transfers,
)

STEPS = -(-LENGTH // BATCH)
QUICK = RunSettings(wanted=3, fewest=1, silence_s=1.0)


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


def say_resources(session: Session) -> None:
    if worker_number() == 0:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        say(("resources", session.world_size, len(os.listdir("/proc/self/fd")), threading.active_count(), resident))


def check_no_leak(run: Rehearsal) -> None:
    """Worker 0 holds as much at the end as after the first changes, when there were as many workers."""
    seen = [one[2:] for one in run.said(0) if one[0] == "resources" and one[1] == 3]
    early, late = seen[: len(seen) // 3], seen[-len(seen) // 3 :]
    for number, (what, spare) in enumerate((("descriptors", 0), ("threads", 0), ("bytes", 64 << 20))):
        before, after = max(one[number] for one in early), min(one[number] for one in late)
        assert after <= before + spare, f"{what}: {before}, and later {after}"


def kill_again_and_again(folder: Path, times: int, seed: int, *, num_spared: int) -> None:
    enough = folder / "enough"
    dice = random.Random(seed)
    function = partial(train, in_body=say_resources)
    with Rehearsal(function, 0, 0.005, str(enough), workers=3, folder=folder) as run:
        living = [0, 1, 2]
        for _ in range(times):
            there = max(steps_of(run, number) for number in living)
            wait_for_steps(run, living, there + dice.randint(1, 9))
            victim = dice.choice(living[num_spared:])
            run.kill(victim)
            living.remove(victim)
            run.add()
            living.append(len(run.workers) - 1)
        there = max(steps_of(run, number) for number in living)
        wait_for_steps(run, living, there + 3)
        enough.touch()
        results = run.finish(living)
        assert [result["pid"] for result in results] == [run.workers[number].pid for number in living]
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        check_record(run, results[0]["steps"])
        if num_spared:
            check_no_leak(run)


def test_a_worker_is_killed_ten_times(tmp_path: Path) -> None:
    """The first one stays: a process of the beginning sees the end."""
    kill_again_and_again(tmp_path, 10, seed=1, num_spared=1)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(6))
def test_a_worker_is_killed_many_times(tmp_path: Path, seed: int) -> None:
    kill_again_and_again(tmp_path, 40, seed, num_spared=seed % 2)


def test_two_killed_at_once_then_all_but_one_then_the_run_grows_again(tmp_path: Path) -> None:
    """The main worker is among the first two: another one becomes main, and checkpoints go on."""
    enough = tmp_path / "enough"
    function = partial(train, checkpoints=Checkpoints(every_s=None, every_steps=4))
    with Rehearsal(function, 0, 0.005, str(enough), workers=5, folder=tmp_path) as run:
        wait_for_steps(run, range(5), 3)
        before_the_deaths = max(one["applied"] for one in run.ask("status")["members"])
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
        (newest, *_) = find(tmp_path / "checkpoints")
        assert newest.operation > before_the_deaths, "checkpoints went on"


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


def both(first: StepFault, second: StepFault, session: Session) -> None:
    first(session)
    second(session)


def test_a_slow_worker_is_not_a_dead_one(tmp_path: Path) -> None:
    """It sleeps once and holds the interpreter's lock once, each for longer than silence is suffered."""
    sleeps = faults.slow(worker=1, at_step=4, seconds=1.5)
    computes = faults.slow(worker=1, at_step=6, seconds=1.5, is_busy=True)
    function = partial(train, in_loss=partial(both, sleeps, computes))
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
        results = [result for result in results if result not in (Died(0), Died(START_AGAIN))]
        assert len(results) >= 3
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS)


def test_all_die_and_the_run_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    enough, held = tmp_path / "enough", tmp_path / "held"
    held.touch()
    function = partial(
        train, checkpoints=Checkpoints(every_s=None, every_steps=3), in_body=faults.hold(held, at_step=8)
    )
    with Rehearsal(function, 0, 0.0, str(enough), workers=2, folder=tmp_path) as run:
        run.wait_for(lambda: [member["applied"] for member in run.ask("status")["members"]] == [8, 8])
        run.wait_for(lambda: newest_good(tmp_path / "checkpoints")[0])
        for number in range(2):
            run.kill(number)
        held.unlink()
        for _ in range(2):
            run.add()
        wait_for_steps(run, [2, 3], 14)
        enough.touch()
        results = run.finish([2, 3])
        check_alike(results)
        check_samples(results, results[0]["steps"] // STEPS, lost=True)
        since = results[0]["committed"][0][1] - 1
        assert since in (3, 6)
        check_record(run, results[0]["steps"])
        assert run.events("rollback") == [f"operations {since + 1} to 8 are done again"]


def test_the_best_model_is_kept_though_the_main_worker_dies_before_it_is_on_disk(tmp_path: Path) -> None:
    """In the first step after a decision, for which it has taken a snapshot."""
    function = partial(
        train,
        checkpoints=Checkpoints(every_s=None, keep_last=1, keep_best=2),
        in_loss=faults.kill(worker="main", at_step=STEPS, once=tmp_path / "died"),
    )
    with Rehearsal(function, 2, 0.0, workers=3, folder=tmp_path) as run:
        results = run.finish()
        check_alike([one for one in results if not isinstance(one, Died)])
        assert results.count(Died(-9)) == 1
        kept = [found.operation for found in find(tmp_path / "checkpoints")]
        assert kept == [2 * (STEPS + 2), STEPS + 2]  # steps, a validation and a decision


def die_as_main_when_the_last_checkpoint_gets_its_name(died: str, session: Session) -> None:
    def die(_: Path) -> None:
        Path(died).touch()
        faults.die()

    if session.is_main and not os.path.exists(died):
        faults.arm(NAMING, die)


def test_the_last_checkpoint_is_there_though_the_main_worker_dies_before_it_has_a_name(tmp_path: Path) -> None:
    function = partial(
        train, before_close=partial(die_as_main_when_the_last_checkpoint_gets_its_name, str(tmp_path / "died"))
    )
    with Rehearsal(function, 1, 0.0, workers=3, folder=tmp_path) as run:
        results = run.finish()
        assert results.count(Died(-9)) == 1
        check_alike([one for one in results if not isinstance(one, Died)])
        assert [found.operation for found in find(tmp_path / "checkpoints")] == [STEPS + 2]


def test_a_signal_lets_one_worker_leave_and_the_last_one_save(tmp_path: Path) -> None:
    """And a later run goes on from there, to the same bits as one that was never interrupted."""
    straight, folder = tmp_path / "straight", tmp_path / "interrupted"
    straight.mkdir()
    folder.mkdir()
    with Rehearsal(train, 3, 0.0, workers=1, folder=straight) as run:
        (expected,) = run.finish()
    settings = RunSettings(wanted=1, fewest=1)
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
            assert (reader.status().status, reader.status().reason) == ("interrupted", "a person had enough")
        check_record(run, steps_of(run, 0))
        assert not run.events("dead")


def die_at(place: str, step: int, me: int, session: Session) -> None:
    """For hooks: worker `me` dies when it comes here with so many steps done."""
    if worker_number() == me and session.steps == step:
        say((place, step))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("place", ["in_validate", "before_decision", "before_close"])
def test_a_worker_dies_outside_of_a_step(tmp_path: Path, place: str) -> None:
    step = STEPS if place != "before_close" else 2 * STEPS
    hooks: dict[str, Any] = {place: partial(die_at, place, step, 1)}
    function = partial(train, **hooks)
    with Rehearsal(function, 2, 0.0, workers=3, folder=tmp_path) as run:
        results = run.finish()
        assert results[1] == Died(-9)
        survivors = [results[0], results[2]]
        check_alike(survivors)
        check_samples(survivors, 2, lost=True)
        assert survivors[0]["steps"] == 2 * STEPS
        assert survivors[0]["scores"] == survivors[1]["scores"]
        check_record(run, 2 * STEPS)


def test_a_worker_that_leaves_the_script_is_reported_and_the_others_go_on(tmp_path: Path) -> None:
    function = partial(train, in_loss=raise_on_worker_1)
    with Rehearsal(function, 2, 0.0, workers=3, folder=tmp_path) as run:
        results = run.finish()
        assert "worker 1 does not like this batch" in results[1].error
        assert results[1].code == 1
        check_alike([results[0], results[2]])
        check_record(run, 2 * STEPS)
        (cause,) = run.events("failed")
        assert cause == "ArithmeticError: worker 1 does not like this batch"


def raise_on_worker_1(session: Session) -> None:
    if worker_number() == 1 and session.steps == 3:
        raise ArithmeticError("worker 1 does not like this batch")


def raise_everywhere(session: Session) -> None:
    if session.steps == 3:
        raise ArithmeticError("nobody likes this batch")


def test_an_error_on_all_workers_fails_the_run_with_its_cause(tmp_path: Path) -> None:
    function = partial(train, in_loss=raise_everywhere)
    with Rehearsal(function, 2, 0.0, workers=2, folder=tmp_path) as run:
        run.exhausted = True
        results = run.finish()
        assert all("nobody likes this batch" in result.error for result in results)
        run.wait_for(lambda: run.coordinator.poll() is not None)
        assert run.coordinator.returncode == 1
        with run.reader() as reader:
            status = reader.status()
        assert status.status == "failed"
        assert "Traceback" in status.reason
        assert "nobody likes this batch" in status.reason


def test_the_main_worker_is_one_operation_behind(tmp_path: Path) -> None:
    """It gets the result from who is ahead, and the run's log has that step too."""
    go_on = tmp_path / "go on"
    with Rehearsal(partial(train_with_a_laggard, str(go_on)), 2, 0.0, workers=3, folder=tmp_path) as run:
        run.wait_for(lambda: any(("behind", 5) in run.said(number) for number in range(3)))
        main, _, last = run.members()
        wait_for_steps(run, [last], 5)  # for the others it counts
        go_on.touch()
        run.kill(last)
        results = run.finish()
        assert ("behind", 5) in run.said(main)
        assert results.pop(last) == Died(-9)
        check_alike(results)
        check_samples(results, 2, lost=True)
        check_record(run, 2 * STEPS)
        assert all(one[1] for number in range(3) for one in run.said(number)), "somebody thought to be nobody"


def evaluate_slowly(held: str, session: Session) -> None:
    """For as long as there is a file of this name."""
    if session.steps == STEPS and os.path.exists(held):
        say(("evaluates", worker_number()))
        faults.wait_while(Path(held))


def test_one_comes_and_one_goes_while_all_evaluate(tmp_path: Path) -> None:
    """The newcomer waits for the next step; who is asked to leave finishes the evaluation and goes before that step."""
    held = tmp_path / "held"
    held.touch()
    function = partial(train, in_validate=partial(evaluate_slowly, str(held)))
    with Rehearsal(function, 3, 0.0, workers=3, folder=tmp_path) as run:
        run.wait_for(lambda: all(run.said(number)[-1:] == [("evaluates", number)] for number in range(3)))
        run.add()
        run.terminate(1)
        run.wait_for(lambda: 3 in run.members())
        held.unlink()
        results = run.finish()
        assert results[1] == Died(0), run.log(1)
        living = [results[0], results[2], results[3]]
        check_alike(living)
        check_samples(living, 3, lost=True)
        check_record(run, 3 * STEPS)
        first, second, late = [result["scores"] for result in living]
        assert first == second
        assert first[-len(late) :] == late
        assert len(late) >= 1


def disturb(run: Rehearsal, dice: random.Random, living: list[int]) -> None:
    """One random thing happens to the run; `living` are the workers that should see its end."""
    what = dice.choice(["kill", "kill", "two", "stop", "leave", "coordinator", "both", "add"])
    num_victims = {"kill": 1, "two": 2, "stop": 1, "leave": 1, "both": 1}.get(what, 0)
    if what in ("stop", "leave"):
        # All are in: the last holder of the state is waited for when it is silent, and ends the run when it leaves.
        wait_for_steps(run, living, max(steps_of(run, number) for number in living) + 1)
    victims = dice.sample(living, min(num_victims, len(living) - 1))
    if what in ("coordinator", "both"):
        run.kill_coordinator()
    for victim in victims:
        {"stop": run.stop, "leave": run.terminate}.get(what, run.kill)(victim)
        living.remove(victim)
    if what == "leave":
        # If the others died first, it would be the last one, and its leave the end of the run.
        run.wait_for(lambda: all(run.workers[victim].exit_code is not None for victim in victims))
    if what in ("coordinator", "both"):
        time.sleep(dice.random())
        run.start_coordinator()
    while len(living) < 3 or (what == "add" and len(living) < 4):
        run.add()
        living.append(len(run.workers) - 1)
    if dice.random() < 0.5:
        time.sleep(dice.random())  # into the midst of what follows, or long after it


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens(tmp_path: Path, seed: int) -> None:
    # Seed 3 has a worker that was asked to leave while the others die and newcomers are ready: it hands over first.
    enough = tmp_path / "enough"
    dice = random.Random(seed)
    function = partial(train, checkpoints=Checkpoints(every_s=None, every_steps=7))
    with Rehearsal(function, 0, 0.003, str(enough), workers=3, folder=tmp_path, settings=QUICK) as run:
        living = [0, 1, 2]
        wait_for_steps(run, living, 2)
        for _ in range(20):
            disturb(run, dice, living)
            if dice.random() < 0.5:
                wait_for_steps(run, living, max(steps_of(run, number) for number in living) + 2)
        wait_for_steps(run, living, max(steps_of(run, number) for number in living) + 3)
        enough.touch()
        results = run.finish(living)
        check_alike(results)
        # The run's log may lack steps here: who died while the coordinator was away did not tell of them.
        if not run.events("lost"):
            check_samples(results, results[0]["steps"] // STEPS, lost=True)
