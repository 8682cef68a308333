"""The last copy of ranges of parameters dies with a server: the run goes on, and says in the end what it lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.checkpoint import find
from paceline.checkpoint.files import read
from paceline.control.exit_codes import LOST
from paceline.control.journal.reader import RunReader
from paceline.control.messages import losses
from paceline.testing.eventually import eventually
from paceline.watch import words
from tests.engine.commands import paceline, pids_of, write_script

TRAINING = """
import pathlib, time
import paceline
from paceline.testing.counting import Counting
from paceline.train.saving import Checkpoints

case = Counting(length=96, batch=8, has_table=True)
model = case.model()
session = paceline.Session(
    model, case.optimizer(model), data=case.data(), global_batch=case.batch, strategy="server",
    checkpoints=Checkpoints(every_s=None, every_steps=5),
)
for epoch in session.epochs(1):
    for batch in epoch:
        session.step(case.loss_fn(model), batch)
        if session.steps == 7:
            pathlib.Path("seven").touch()
            until = time.monotonic() + 60
            while not pathlib.Path("go").exists() and time.monotonic() < until:
                time.sleep(0.01)
"""

LEASED = TRAINING.replace('strategy="server",', 'strategy="server", consistency="async",').replace(
    "epochs(1)", "epochs(3)"
)


def test_a_run_that_lost_the_last_copy_of_ranges_ends_with_a_code_of_its_own_and_says_how_much(tmp_path: Path) -> None:
    """It stands after step 7, with a checkpoint of step 5: rows that one of two servers had lack two steps."""
    script = write_script(tmp_path, TRAINING)
    with paceline(tmp_path, "run", "-n", "1", "--servers", "2", "--name", "a", script) as command:
        folder = tmp_path / "runs" / "a"
        eventually((tmp_path / "seven").exists, "seven steps")
        eventually(lambda: bool(find(folder / "checkpoints")), "a checkpoint")
        (server,) = pids_of(tmp_path, "s0")
        os.kill(server, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert command.wait() == LOST, command.err
        line = "lost: 2 updates, 16 samples, of parameters whose last copy died with a server"
        assert "paceline: the run a has ended\n" + line in command.err
        with RunReader(folder) as reader:
            assert reader.status().status == "ended"


@pytest.mark.parametrize("last", [7, 12], ids=["in an epoch", "at the end of an epoch"])
def test_leases_that_went_with_the_last_copy_of_rows_are_counted(tmp_path: Path, last: int) -> None:
    """In an epoch, a pull of rows is the first to ask the servers again."""
    script = write_script(tmp_path, LEASED.replace("session.steps == 7", f"session.steps == {last}"))
    with paceline(tmp_path, "run", "-n", "1", "--servers", "2", "--name", "a", script) as command:
        folder = tmp_path / "runs" / "a"
        eventually((tmp_path / "seven").exists, "the step")
        eventually(lambda: len(find(folder / "checkpoints")) == last // 5, "the checkpoints")
        newest = find(folder / "checkpoints")[0].path
        ((_, kept, _),) = {tuple(map(str, record)) for record in read(newest).state["leases"].values()}
        (server,) = pids_of(tmp_path, "s0")
        os.kill(server, signal.SIGKILL)
        (tmp_path / "go").touch()
        assert command.wait() == LOST, command.err
        with RunReader(folder) as reader:
            told = [losses.numbers_in(event.text) for event in reader.events() if event.kind == losses.KIND]
        lost = set(range(int(kept) + 1, last + 1))
        assert told == [set(), lost]
        assert f"lost: {words.count(len(lost), 'update')}, {8 * len(lost)} samples, of parameters" in command.err
