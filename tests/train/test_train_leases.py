"""Training without a global step, on real servers: every sample counts once an epoch, whoever dies, comes or goes."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.control.machines.member import Member
from paceline.control.messages.members import Directive, Verdict
from paceline.testing.rehearsal import Rehearsal
from paceline.train.membership import Membership, Released
from paceline.train.session import Session
from paceline.watch.audit import audit
from tests.train.server_runs import check_nothing_left, settings_for, wait_for_leases
from tests.train.table_trainers import BATCH, LENGTH, STEPS, Case, alone, train

torch.set_num_threads(1)

ASYNC = Case("server", "adamw", consistency="async")


class Looking:
    """What a membership asks of its client here."""

    def __init__(self, machine: Member) -> None:
        self._machine = machine

    def look(self, question: Callable[[Member], Any]) -> Any:
        return question(self._machine)


def test_a_worker_that_is_told_to_go_waits_for_no_server() -> None:
    """The run may end, and its servers with it, while a worker that was let go is at its last push."""
    machine = Member("A")
    membership = Membership(machine, "test")
    membership.connect(Looking(machine), None, None)  # type: ignore[arg-type]
    membership.check_wait()
    for action in machine.handle(Directive(1, 1, "A", Verdict.RELEASED, "left the run")):
        membership.act(action)
    membership.check()  # what it computes it may finish
    with pytest.raises(Released, match="left the run"):
        membership.check_wait()


def check_counts(run: Rehearsal, epochs: int) -> None:
    """Each sample of each epoch once."""
    with run.reader() as reader:
        found: Counter[tuple[int, int]] = Counter()
        for row in reader.steps():
            found.update((row.epoch, row.position + offset) for offset in range(row.count))
        audited = audit(reader.steps(), LENGTH, BATCH)
    assert found == Counter({(epoch, sample): 1 for epoch in range(epochs) for sample in range(LENGTH)})
    assert audited.is_exact, audited.details


def check_equals_alone(result: dict[str, Any], case: Case) -> None:
    wanted = alone(case._replace(consistency="sync"))
    for name, value in wanted["parameters"].items():
        found = torch.tensor(result["parameters"][name])
        assert torch.allclose(found, torch.tensor(value), rtol=2e-4, atol=2e-5), name
    for found_rows, wanted_rows in zip(result["rows"], wanted["rows"], strict=True):
        assert torch.allclose(torch.tensor(found_rows), torch.tensor(wanted_rows), rtol=2e-4, atol=2e-5)


def check_same_model(results: list[dict[str, Any]]) -> None:
    for name in ("parameters", "rows", "steps"):
        assert all(result[name] == results[0][name] for result in results), name
    assert len({result["scores"][-1] for result in results}) == 1
    # Who had no lease at all has not seen what the body does to a schedule.
    assert len({result["schedule"] for result in results if result["losses"]}) == 1


@pytest.mark.parametrize(
    ("consistency", "options"),
    [("async", {}), ("bounded:2", {"prefetches": True, "is_far": True, "tables": (("cache", 3), ("evict_after", 20))})],
)
def test_every_sample_counts_once_and_the_model_learns(
    tmp_path: Path, consistency: str, options: dict[str, Any]
) -> None:
    case = ASYNC._replace(consistency=consistency, epochs=8, **options)
    with Rehearsal(train, case, workers=3, folder=tmp_path, settings=settings_for(3, 2)) as run:
        results = run.finish()
        check_same_model(results)
        check_counts(run, case.epochs)
        assert results[0]["steps"] == case.epochs * STEPS
        assert {result["schedule"] for result in results if result["losses"]} == {case.epochs * STEPS}
        assert sum(len(result["losses"]) for result in results) >= case.epochs * STEPS, (
            "taken back in vain now and then"
        )
        # One process, which does one lease after the other, comes to 0.52 of it; what others come to varies.
        assert results[0]["scores"][-1] < 0.8 * results[0]["scores"][0]
        assert (sum(result["taken"] for result in results) > 0) is case.prefetches
        check_nothing_left(run)


def test_bounded_by_nothing_is_one_after_the_other(tmp_path: Path) -> None:
    """With a bound of 0 a lease sees all before it: what comes out is what one process comes to. But for a schedule:
    what the body does to it is not known before it has run."""
    case = ASYNC._replace(consistency="bounded:0", epochs=3, clip_norm=0.5, decay=1.0)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2, replicas=2)) as run:
        results = run.finish()
        check_same_model(results)
        check_equals_alone(results[0], case)


RESUMED = ASYNC._replace(consistency="bounded:0", epochs=3, decay=1.0, every_steps=4, pause_s=0.02)
"""With a bound of 0, a lease that is lost or counted twice changes the result."""


def check_resumed(run: Rehearsal, results: list[dict[str, Any]]) -> None:
    check_counts(run, RESUMED.epochs)
    check_equals_alone(results[0], RESUMED)
    check_same_model(results)
    # What the checkpoint had was not done again: that would have moved schedules on.
    assert {result["schedule"] for result in results if result["losses"]} == {RESUMED.epochs * STEPS}


def test_a_run_of_which_nobody_is_left_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Which has less than what is recorded as done."""
    with Rehearsal(train, RESUMED, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        wait_for_leases(run, STEPS + 3)
        run.kill_coordinator()
        for child in (*run.workers, *run.servers):
            child.send(signal.SIGKILL)
    with Rehearsal(train, RESUMED, workers=2, folder=tmp_path, settings=settings_for(2, 1)) as run:
        check_resumed(run, run.finish())


def test_workers_after_the_last_one_go_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Which has less than what the coordinator and the servers know."""
    with Rehearsal(train, RESUMED, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        wait_for_leases(run, STEPS + 3)
        for number in (0, 1):
            run.stop(number)  # or the second one goes on a little with what the first one left
        for number in (0, 1):
            run.kill(number)
        run.add()
        run.add()
        check_resumed(run, run.finish([2, 3]))


@pytest.mark.parametrize("consistency", [pytest.param("async", marks=pytest.mark.soak), "bounded:1"])
def test_deaths_leaves_and_joins_lose_and_repeat_nothing(tmp_path: Path, consistency: str) -> None:
    enough = tmp_path / "enough"
    case = ASYNC._replace(consistency=consistency, pause_s=0.01, enough=str(enough), prefetches=True)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2, replicas=2)) as run:
        wait_for_leases(run, 4)
        run.servers[0].send(signal.SIGKILL)
        run.add_server()
        run.wait_for(lambda: run.is_settled([1, 2]))
        wait_for_leases(run, 4)
        run.kill(0)
        run.add()
        run.wait_said(2, 2)
        run.kill_coordinator()
        run.kill(1)
        run.start_coordinator()
        run.add()
        run.wait_said(3, 2)
        run.terminate(2)
        wait_for_leases(run, 4)
        enough.touch()
        (result,) = run.finish([3])
        check_counts(run, result["steps"] // STEPS)
        assert not run.events("lost ranges")
        check_nothing_left(run)


def test_a_run_that_was_stopped_goes_on_where_it_stood(tmp_path: Path) -> None:
    """In the middle of an epoch, with another number of servers and of workers."""
    case = ASYNC._replace(epochs=4, pause_s=0.05)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        wait_for_leases(run, STEPS + 2)
        run.ask("halt", "that is enough for today")
        run.finish()
        check_nothing_left(run)
    with Rehearsal(train, case, workers=1, folder=tmp_path, settings=settings_for(1, 1)) as run:
        (result,) = run.finish()
        check_counts(run, case.epochs)
        assert result["steps"] == case.epochs * STEPS


def test_what_does_not_fit_is_refused_by_name() -> None:
    data = [(torch.zeros(2), torch.zeros(1))] * 8

    def make(model: nn.Module, **options: Any) -> Session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Session(model, optimizer, data=data, global_batch=4, **options)

    with pytest.raises(ValueError, match="consistency='eventual': use 'sync', 'async', or 'bounded:K'"):
        make(nn.Linear(2, 1), strategy="server", consistency="eventual")
    with pytest.raises(ValueError, match="strategy='allreduce' does"):
        make(nn.Linear(2, 1), consistency="async")
    with pytest.raises(ValueError, match="batch normalisation"):
        make(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), strategy="server", consistency="async")
