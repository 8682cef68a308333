"""Workers that update without waiting for each other, and a model that counts its samples: what each of them sees at an
epoch's end, and what each checkpoint has, is exact; so is what comes of going on from any of them."""

from __future__ import annotations

import functools
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint import find, read
from paceline.control.leases.lease_set import LeaseSet, lease_set
from paceline.control.messages.losses import KIND, numbers_in
from paceline.data.order import EpochOrder
from paceline.testing.account import account_of
from paceline.testing.counting import Counting
from paceline.testing.rehearsal import Died, Rehearsal
from paceline.watch.losses import Lost, find_lost
from tests.train.counting_trainers import Case, train, train_and_give_late
from tests.train.server_runs import num_leases, settings_for, wait_for_leases

torch.set_num_threads(1)

COUNTING = Counting(length=96, batch=8, seed=3).in_ranges(6)
ADAGRAD = COUNTING._replace(rule="adagrad")  # tells weights and optimizer state of different moments apart
TABLE = COUNTING._replace(has_table=True)


def run_once(case: Case, workers: int, servers: int, folder: Path) -> list[Any]:
    folder.mkdir(parents=True, exist_ok=True)
    with Rehearsal(train, case, workers=workers, folder=folder, settings=settings_for(workers, servers)) as run:
        results = run.finish()
    assert not any(isinstance(result, Died) for result in results), f"{results}\n{account_of(folder)}"
    return results


def run_until(case: Case, workers: int, folder: Path, look: Callable[[Rehearsal], Any]) -> Any:
    """For as many epochs as it takes: how many checkpoints there are in one depends on the disk. What was seen."""
    folder.mkdir(parents=True)
    endless = case._replace(epochs=10**6)
    with Rehearsal(train, endless, workers=workers, folder=folder, settings=settings_for(workers, 2)) as run:
        found = run.wait_for(lambda: look(run))
        run.ask("halt", "that is enough")
        run.finish()
        return found


def done_in(path: Path, case: Case) -> LeaseSet:
    """What a checkpoint has, in all of its ranges."""
    contents = read(path)
    if case.consistency == "sync":
        return LeaseSet(contents.epoch, contents.position // case.counting.batch)
    return functools.reduce(LeaseSet.meet, (lease_set(*record) for record in contents.state["leases"].values()))


def check_results(results: list[Any], case: Case) -> None:
    assert [result["faults"] for result in results] == [[]] * len(results)
    assert {result["steps"] for result in results} == {case.epochs * case.counting.num_leases}


def checkpoints_of(folder: Path) -> list[Path]:
    return [found.path for found in find(folder / "checkpoints")]


def check_checkpoints(folder: Path, counting: Counting) -> None:
    faults = {path.name: counting.faults_of_checkpoint(read(path), leased=True) for path in checkpoints_of(folder)}
    assert {name: one for name, one in faults.items() if one} == {}


@pytest.mark.parametrize("consistency", ["async", "bounded:0", "bounded:1", "bounded:4"])
@pytest.mark.parametrize(
    ("workers", "servers", "counting"),
    [(2, 1, ADAGRAD), (3, 2, TABLE)],
    ids=["2 workers, 1 server", "3 workers, 2 servers, a table"],
)
def test_every_worker_and_every_checkpoint_has_exactly_what_was_done(
    tmp_path: Path, consistency: str, workers: int, servers: int, counting: Counting
) -> None:
    """With several epochs, and a worker that is slower than the others: the last lease of an epoch is often another's
    than that of whom one asks."""
    case = Case(counting, consistency, epochs=4, pause_s=0.002, every_steps=1, keep_last=1000)
    check_results(run_once(case, workers, servers, tmp_path), case)
    assert len(checkpoints_of(tmp_path)) >= 2, "one at the end, and one before; how many more depends on the disk"
    check_checkpoints(tmp_path, counting)
    last = read(checkpoints_of(tmp_path)[0])
    assert counting.faults_of_model(last.model, case.epochs) == []


@pytest.mark.parametrize("counting", [ADAGRAD, TABLE], ids=["adagrad", "a table"])
def test_going_on_from_any_checkpoint_loses_and_repeats_nothing(tmp_path: Path, counting: Counting) -> None:
    case = Case(counting, "async", pause_s=0.004, every_steps=1, keep_last=1000)
    first = tmp_path / "first"

    def is_enough(run: Rehearsal) -> bool:
        return len(checkpoints_of(first)) >= 6 and num_leases(run) > counting.num_leases

    run_until(case, 2, first, is_enough)
    taken = checkpoints_of(first)
    case = case._replace(epochs=done_in(taken[0], case).epoch + 1)
    for path in taken[1 :: len(taken) // 4]:
        folder = tmp_path / path.name
        (folder / "checkpoints").mkdir(parents=True)
        shutil.copytree(path, folder / "checkpoints" / path.name)
        check_results(run_once(case, 2, 1, folder), case)
        check_checkpoints(folder, counting)


def test_a_worker_that_gets_the_state_while_others_do_leases_gets_it_whole(tmp_path: Path) -> None:
    """The founder does not wait for the other one: it has new values, twice over, before the first tensor leaves."""
    case = Case(TABLE, "async", epochs=2)
    with Rehearsal(train_and_give_late, case, 5, workers=2, folder=tmp_path, settings=settings_for(2, 1)) as run:
        check_results(run.finish(), case)
        with run.reader() as reader:
            assert [plan.start for plan in reader.plans()] == ["found"], "nothing broke"


def test_a_run_that_is_stopped_in_an_epoch_has_all_that_was_done_in_its_last_checkpoint(tmp_path: Path) -> None:
    case = Case(ADAGRAD, "async", epochs=4, pause_s=0.02)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        wait_for_leases(run, ADAGRAD.num_leases + 5)
        run.ask("halt", "that is enough for today")
        run.finish()
        with run.reader() as reader:
            num_done = len(reader.steps())
    (path, *_) = checkpoints_of(tmp_path)
    check_checkpoints(tmp_path, ADAGRAD)
    counts = ADAGRAD.counts_of(read(path).model["counts"])
    assert int(counts[0].sum()) == num_done * ADAGRAD.batch, "the last lease of each worker is in it"
    check_results(run_once(case, 1, 1, tmp_path), case)


SYNC = Case(TABLE, "sync", epochs=2, pause_s=0.01, every_steps=1, keep_last=1000)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (SYNC, SYNC._replace(consistency="async")),
        (SYNC._replace(consistency="async"), SYNC),
        (SYNC._replace(consistency="async"), SYNC._replace(strategy="allreduce")),
    ],
    ids=["steps, then leases", "leases, then steps", "leases, then steps without servers"],
)
def test_going_on_in_another_mode_in_the_middle_of_an_epoch(tmp_path: Path, first: Case, second: Case) -> None:
    """Of one worker: its leases are done in a row, so that steps can go on after them."""

    def amid() -> Path | None:
        """The newest checkpoint, if it is of the middle of an epoch, and not of the first."""
        for path in checkpoints_of(tmp_path / "first")[:1]:
            done = done_in(path, first)
            if done.epoch and 2 < len(done) < TABLE.num_leases - 2:
                return path
        return None

    path = run_until(first, 1, tmp_path / "first", lambda _: amid())
    (folder := tmp_path / "second" / "checkpoints").mkdir(parents=True)
    shutil.copytree(path, folder / path.name)
    second = second._replace(epochs=done_in(path, first).epoch + 1)
    num_servers = 0 if second.strategy == "allreduce" else 1
    check_results(run_once(second, 2, num_servers, tmp_path / "second"), second)


@pytest.mark.parametrize("consistency", ["async", "bounded:2"])
def test_what_is_lost_with_the_last_copy_is_named_exactly(tmp_path: Path, consistency: str) -> None:
    """The model tells which updates are missing in any range: these, and no others, are in the log."""
    case = Case(COUNTING, consistency, epochs=3, pause_s=0.01, every_steps=4)
    with Rehearsal(train, case, workers=3, folder=tmp_path, settings=settings_for(3, 2)) as run:
        run.wait_for(lambda: checkpoints_of(tmp_path))
        wait_for_leases(run, 4)
        run.servers[0].send(signal.SIGKILL)
        run.add_server()
        results = run.finish()
        assert run.events("lost ranges")
        with run.reader() as reader:
            run.wait_for(lambda: reader.status().status == "ended")  # what workers told last is written by then
            told = {number for event in reader.events() if event.kind == KIND for number in numbers_in(event.text)}
            lost, events, plans = find_lost(reader), reader.events(), reader.plans()
    highest, lowest = (torch.tensor(results[0][name]) for name in ("highest", "lowest"))
    assert highest.tolist() == [case.epochs] * COUNTING.length, "nothing counts twice, and not all ranges were lost"
    missing = case.epochs - lowest
    expected = torch.zeros(COUNTING.length, dtype=torch.int64)
    for number in told:
        epoch, lease = divmod(number - 1, COUNTING.num_leases)
        order = EpochOrder(COUNTING.seed, epoch, COUNTING.length)
        expected[torch.from_numpy(order.slice(lease * COUNTING.batch, (lease + 1) * COUNTING.batch))] += 1
    assert missing.tolist() == expected.tolist()
    assert (lost or Lost(0, 0)) == Lost(len(told), len(told) * COUNTING.batch), (told, events, plans)
    assert all(result["lowest"] == results[0]["lowest"] for result in results)
