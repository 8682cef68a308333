"""The last lines of `paceline run`, and one that is not begun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli.main import app
from paceline.control.journal.journal import Journal
from paceline.engine import folders, running
from paceline.engine.events import RunOutcome, RunResult
from paceline.engine.folders import ClaimedFolder
from paceline.engine.supervisor import FINISHED

STOPPED = RunOutcome(RunResult.ENDED, 0, reason="a person asked for the end")
RESUME = ["paceline", "run", "--resume", "train.py"]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ClaimedFolder]:
    with contextlib.closing(folders.claim(tmp_path, "a")) as place:
        yield place


def written(place: ClaimedFolder, status: str, reason: str) -> None:
    with contextlib.closing(Journal(place.folder)) as journal:
        journal.record(run={"status": status, "reason": reason})


def said(place: ClaimedFolder, outcome: RunOutcome, capsys: pytest.CaptureFixture[str]) -> list[str]:
    running.report(outcome, [], place, RESUME, stopped=running.why_stopped(outcome, place))
    return capsys.readouterr().err.splitlines()


def test_a_run_that_was_stopped_before_its_first_step_says_so(
    place: ClaimedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    written(place, "interrupted", STOPPED.reason)
    lines = said(place, STOPPED, capsys)
    assert lines[0] == "paceline: the run a was stopped: a person asked for the end"
    assert lines[1] == "nothing was saved: no worker had joined the run yet"


def test_a_run_that_was_interrupted_while_it_started_says_that_nothing_was_saved(
    place: ClaimedFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    written(place, "interrupted", STOPPED.reason)
    lines = said(place, RunOutcome(RunResult.INTERRUPTED, 130, reason=STOPPED.reason), capsys)
    assert lines[:2] == ["paceline: the run a was interrupted", "nothing was saved: no worker had joined the run yet"]


def test_a_run_whose_record_was_deleted_says_so(place: ClaimedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    shortfall = running.find_shortfall(place, had_record=True)
    running.report(RunOutcome(RunResult.ENDED, 0, reason="all members reached the end"), [], place, RESUME, shortfall)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "paceline: the run a has ended"
    assert lines[1].startswith(f"no record: {place.folder / 'run.db'} was deleted while the run went on")
    assert not any(running.find_shortfall(place, had_record=False))


def test_a_run_that_was_stopped_says_how_to_go_on(place: ClaimedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    written(place, "interrupted", STOPPED.reason)
    (place.folder / "checkpoints" / "step-000000007-op-7").mkdir(parents=True)
    lines = said(place, STOPPED, capsys)
    assert lines[1:3] == ["go on after step 7 with:", "  paceline run --resume train.py"]


@pytest.mark.parametrize(
    ("status", "reason"), [("ended", "all members reached the end"), ("interrupted", FINISHED), ("interrupted", "")]
)
def test_a_run_that_came_to_its_end_says_nothing(
    place: ClaimedFolder, capsys: pytest.CaptureFixture[str], status: str, reason: str
) -> None:
    written(place, status, reason)
    assert said(place, RunOutcome(RunResult.ENDED, 0, reason=reason), capsys) == []


def test_a_script_without_a_run_says_nothing(place: ClaimedFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(place, STOPPED, capsys) == []


def test_an_address_that_is_not_of_this_machine_leaves_no_folder(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    command = ["run", "--folder", str(tmp_path / "runs"), "--listen", "192.0.2.1", str(script)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "192.0.2.1" in result.output
    assert not (tmp_path / "runs").exists()
