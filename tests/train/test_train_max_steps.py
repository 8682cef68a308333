"""`epochs(n, max_steps=N)` ends after N steps of the run in all, on every worker, and goes on from there."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from paceline.testing.rehearsal import Rehearsal, say
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.server_runs import settings_for, wait_for_leases
from tests.train.trainers import Numbered

torch.set_num_threads(1)

LENGTH, BATCH = 40, 4
STEPS = LENGTH // BATCH


class Tally(nn.Module):
    """Counts how often each sample came, in parts of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(LENGTH))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return -self.counts[numbers].mean()

    def samples(self) -> list[int]:
        return [round(count) for count in (self.counts.detach() * BATCH).tolist()]


class Case(NamedTuple):
    max_steps: int
    strategy: str = "allreduce"
    consistency: str = "sync"
    pause_s: float = 0.0
    every_steps: int | None = None


def count_steps(case: Case, tell: Callable[[Any], None] = say, **checkpoints: Any) -> dict[str, Any]:
    model = Tally()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=1.0)
    session = Session(
        *(model, optimizer, schedule),
        data=Numbered(LENGTH),
        global_batch=BATCH,
        strategy=case.strategy,  # type: ignore[arg-type]
        consistency=case.consistency,
        checkpoints=Checkpoints(every_s=None, every_steps=case.every_steps, **checkpoints),
    )

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        time.sleep(case.pause_s)
        return model(numbers)  # type: ignore[no-any-return]

    epochs = []
    with session:
        for epoch in session.epochs(100, max_steps=case.max_steps):
            epochs.append(epoch.number)
            for batch in epoch:
                session.step(loss_fn, batch)
                schedule.step()
                tell((session.steps, session.world_size))
    return {"steps": session.steps, "epochs": epochs, "samples": model.samples(), "schedule": schedule.last_epoch}


def check_samples(result: dict[str, Any], num_steps: int) -> None:
    """In whole epochs each came once, in the last one the first ones did."""
    assert result["steps"] == num_steps
    assert sum(result["samples"]) == num_steps * BATCH
    assert {num_steps // STEPS, -(-num_steps // STEPS)} == set(result["samples"])


def test_alone_the_loop_ends_within_an_epoch_and_is_resumed_there(tmp_path: Path) -> None:
    for max_steps, epochs in ((13, [0, 1]), (13, []), (17, [1]), (20, [1]), (25, [2])):
        case = Case(max_steps, every_steps=4)
        result = count_steps(case, lambda _: None, folder=tmp_path, resume=True)
        check_samples(result, max_steps)
        assert result["epochs"] == epochs
    with pytest.raises(ValueError, match="max_steps=-1"):
        count_steps(Case(-1))


def test_a_second_loop_counts_the_steps_of_the_first_and_who_comes_later_finds_the_same_place() -> None:
    def loops(session: Session, model: Tally) -> list[tuple[int, int]]:
        found = []
        for max_steps in (3, 5):
            for epoch in session.epochs(4, max_steps=max_steps):
                for batch in epoch:
                    session.step(lambda x, y, numbers: model(numbers), batch)
                    found.append((epoch.number, session.steps))
        return found

    def make() -> tuple[Session, Tally]:
        model = Tally()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return Session(model, optimizer, data=Numbered(LENGTH), global_batch=BATCH), model

    session, model = make()
    assert loops(session, model) == [(0, 1), (0, 2), (0, 3), (4, 4), (4, 5)]
    later, model = make()
    later._run.seat()
    later._parts.ledger.book = session._parts.ledger.book.copy()
    assert loops(later, model) == []
    later.close()
    session.close()


def test_all_workers_leave_after_the_same_step_though_they_come_and_go(tmp_path: Path) -> None:
    case = Case(37, pause_s=0.1)
    with Rehearsal(count_steps, case, workers=2, folder=tmp_path) as run:
        run.wait_said(0, 3)
        run.kill(1)
        run.add()
        run.wait_said(2, 1)
        results = run.finish([0, 2])
    for result in results:
        check_samples(result, 37)
        assert result == {**results[0], "epochs": result["epochs"]}


def test_leases_end_after_as_many_and_go_on_from_there(tmp_path: Path) -> None:
    """Somebody comes meanwhile; the next time there are other workers, and the last time steps instead of leases."""
    case = Case(33, "server", "async", pause_s=0.05)
    with Rehearsal(count_steps, case, workers=2, folder=tmp_path, settings=settings_for(2, 1)) as run:
        wait_for_leases(run, 3)
        run.add()
        run.wait_said(2, 1)
        results = run.finish()
        with run.reader() as reader:
            assert sorted(row.operation for row in reader.steps()) == list(range(1, 34))
    for result in results:
        check_samples(result, 33)
        assert result["schedule"] == 33
    for max_steps, consistency in ((33, "async"), (46, "bounded:0"), (58, "sync")):
        again = case._replace(max_steps=max_steps, consistency=consistency, pause_s=0.0)
        with Rehearsal(count_steps, again, workers=1, folder=tmp_path, settings=settings_for(1, 1)) as run:
            (result,) = run.finish()
        check_samples(result, max_steps)


def test_a_lease_run_of_which_nobody_is_left_ends_after_as_many_too(tmp_path: Path) -> None:
    case = Case(23, "server", "bounded:1", pause_s=0.05, every_steps=3)
    with Rehearsal(count_steps, case, workers=2, folder=tmp_path, settings=settings_for(2, 1)) as run:
        wait_for_leases(run, STEPS + 4)
        for number in (0, 1):
            run.stop(number)
        for number in (0, 1):
            run.kill(number)
        run.add()
        (result,) = run.finish([2])
    check_samples(result, 23)
