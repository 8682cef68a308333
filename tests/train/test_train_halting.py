"""When a worker takes the coordinator for lost, and what it leaves behind then."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from paceline.checkpoint import Contents, files, find, read
from paceline.control.machines.lost_head import WORKING_PATIENCE_S, OrphanMove, Sight, decide, has_seat_on
from paceline.control.messages.plan import Plan, PlanStart, Seat
from paceline.custody.shelf import RetentionRules
from paceline.train import halting
from paceline.train.halting import write_held
from paceline.wire.card import Card

PATIENCE_S = 30.0
RULES = RetentionRules(3, 1)


@pytest.mark.parametrize(
    ("sight", "move"),
    [
        (Sight(29.0, 29.0, has_plan=True, is_with_head=False), OrphanMove.WAIT),
        (
            Sight(31.0, 0.1, has_plan=False, is_with_head=False),
            OrphanMove.WAIT,
        ),  # it gives up where it waits for a plan
        (Sight(31.0, 0.1, has_plan=True, is_with_head=False), OrphanMove.STOP),
        (Sight(31.0, 31.0, has_plan=True, is_with_head=False), OrphanMove.BREAK),
        (Sight(31.0, 0.1, has_plan=True, is_with_head=True), OrphanMove.WAIT),  # the host lives: its workers do
        (Sight(31.0, 31.0, has_plan=True, is_with_head=True), OrphanMove.BREAK),
        (Sight(31.0, 0.1, has_plan=True, is_with_head=True, is_asked=True), OrphanMove.STOP),
        (Sight(WORKING_PATIENCE_S, 0.1, has_plan=True, is_with_head=True), OrphanMove.STOP),
    ],
)
def test_what_is_done_about_a_coordinator_that_is_not_heard(sight: Sight, move: OrphanMove) -> None:
    assert decide(sight, PATIENCE_S) is move


def test_a_seat_is_on_a_host_whatever_its_label() -> None:
    seats = tuple(Seat(Card("m", "worker", host, ("", 0), "", b"", False, ())) for host in ("a1 rack", "b2"))
    plan = Plan(1, PlanStart.FOUND, seats)
    assert has_seat_on(plan, "a1")
    assert has_seat_on(plan, "b2")
    assert not has_seat_on(plan, "a")
    assert not has_seat_on(None, "a1")


def contents_of(operation: int) -> Contents:
    return Contents(
        run="r",
        step=operation,
        operation=operation,
        epoch=0,
        position=8,
        model={"w": torch.full((3,), float(operation))},
    )


def test_the_newest_that_a_worker_of_a_host_holds_is_what_stays(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for operation in (7, 6, 7, 8):
        assert (
            write_held(folder, contents_of(operation), RULES)
            == folder / f"step-{max(operation, 7):09d}-op-{max(operation, 7)}"
        )
    assert [found.operation for found in find(folder)] == [8, 7]
    assert read(folder / "latest").model["w"].tolist() == [8.0] * 3


def test_workers_of_one_host_write_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, inside, most, written = files.write, [0], [0], []

    def write(folder: Path, contents: Contents) -> Path:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        written.append(contents.operation)
        path = real(folder, contents)
        inside[0] -= 1
        return path

    monkeypatch.setattr(files, "write", write)
    threads = [threading.Thread(target=write_held, args=(tmp_path, contents_of(5), RULES)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert (written, most) == ([5], [1])


def test_one_that_holds_the_lock_for_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halting, "_LOCK_S", 0.1)
    with halting._locked(tmp_path / halting.LOCK), pytest.raises(TimeoutError, match="another worker"):
        write_held(tmp_path, contents_of(5), RULES)
