"""A disk that is full to the last page in the middle of a run: worker and coordinator may die all the same."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.testing.eventually import eventually
from paceline.testing.faults import fill
from tests.engine.commands import Command, is_alive, paceline, write_script

TRAINING = """
import sys
from tests.engine import members
verdict = members.train(10**6)
sys.exit(0 if verdict == "released" else 1)
"""


@pytest.fixture
def small_disk(mount_small: Callable[[str], Path]) -> Path:
    return mount_small("16m")


def num_plans(disk: Path) -> int:
    try:
        with RunReader(disk / "runs" / "a") as reader:
            return len(reader.plans())
    except JournalError:  # it is just being made
        return 0


def num_at_work(folder: Path, generation: int) -> int:
    """How many members have begun an operation of a generation, by the files in which they meet."""
    return len({path.name.split("-")[2] for path in (folder / "meeting").glob(f"{generation}-[0-9]*-*")})


def members_in(command: Command) -> int:
    return command.out.count("] member ")


def test_deaths_on_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    script = write_script(tmp_path, TRAINING)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", "--folder", "small/runs", script) as command:
        eventually(lambda: members_in(command) == 2, "the workers")
        eventually(lambda: num_plans(small_disk) == 1, "the first plan")
        filler = fill(small_disk / "filler")
        os.kill(command.workers()[0], signal.SIGKILL)
        eventually(lambda: members_in(command) == 3, "another worker")
        eventually(lambda: num_plans(small_disk) >= 3, "a plan without the dead one, and one with its successor")
        # Only now do two members hold the state, which is nowhere else: the next one to die may be either.
        eventually(lambda: num_at_work(tmp_path, 3) == 2, "the successor at work")
        assert "workers.json cannot be written: No space left on device (0 bytes are free there)" in command.err
        (coordinator,) = command.coordinators()
        os.kill(coordinator, signal.SIGKILL)
        eventually(lambda: command.coordinators() not in ([], [coordinator]), "another coordinator")
        os.kill(command.workers()[0], signal.SIGKILL)
        eventually(lambda: num_plans(small_disk) >= 5, "a plan without that one, and one with its successor")
        filler.unlink()
        command.interrupt()
        assert command.wait() == 130, command.err
    with RunReader(small_disk / "runs" / "a") as reader:
        assert reader.status().status == "interrupted"


def test_a_coordinator_that_cannot_begin_for_want_of_room_is_waited_for(tmp_path: Path, small_disk: Path) -> None:
    """The memory that users of the database share is a file; it is made anew where it is missing."""
    script = write_script(tmp_path, TRAINING)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", "--folder", "small/runs", script) as command:
        eventually(lambda: members_in(command) == 2, "the workers")
        eventually(lambda: num_plans(small_disk) == 1, "the first plan")
        (coordinator,) = command.coordinators()
        os.kill(command.pid, signal.SIGSTOP)  # what is done now is done before the next coordinator is started
        os.kill(coordinator, signal.SIGKILL)
        eventually(lambda: not is_alive(coordinator), "its end")
        (small_disk / "runs/a/run.db-shm").unlink()
        filler = fill(small_disk / "filler")
        os.kill(command.pid, signal.SIGCONT)
        eventually(lambda: "the coordinator waits for room on the disk" in command.err, "that it is waited for")
        filler.unlink()
        eventually(lambda: num_plans(small_disk) >= 1 and len(command.coordinators()) == 1, "another coordinator")
        os.kill(command.workers()[0], signal.SIGKILL)
        eventually(lambda: members_in(command) == 3, "another worker")
        eventually(lambda: num_plans(small_disk) >= 3, "its plan")
        command.interrupt()
        assert command.wait() == 130, command.err


SAVING = """
import time, torch
import paceline

torch.manual_seed(0)
model = torch.nn.Linear(500, 500)
session = paceline.Session(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    data=torch.utils.data.TensorDataset(torch.randn(40, 500)),
    global_batch=8,
    checkpoints=paceline.Checkpoints(every_s=None),
)
for epoch in session.epochs(100_000):
    for batch in epoch:
        session.step(lambda x: model(x).square().mean(), batch)
        time.sleep(0.02)
"""


def num_steps(disk: Path) -> int:
    with contextlib.suppress(JournalError), RunReader(disk / "runs" / "a") as reader:
        return reader.status().num_steps
    return 0


@pytest.mark.timeout(180)
def test_who_ends_a_run_that_waits_for_room_is_told_what_for_and_what_is_lost(tmp_path: Path, small_disk: Path) -> None:
    script = write_script(tmp_path, SAVING)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", "--folder", "small/runs", script) as command:
        eventually(lambda: num_steps(small_disk) > 3, "steps")
        fill(small_disk / "filler")
        command.interrupt()
        eventually(lambda: "Ctrl-C again ends the run without it" in command.out + command.err, "what it waits for")
        assert f"5 minutes at most: no room for a checkpoint in {small_disk}" in command.out + command.err
        command.interrupt()
        assert command.wait() == 130, command.err
        last = command.err.rpartition("paceline: the run a was interrupted")[2]
        assert "not saved: the state after operation " in last, command.err
        assert "is in no checkpoint: no room for a checkpoint in" in last
