"""One look at a run in each of its states, as JSON and as a table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from paceline.control.journal.folder import LOCK_FILE
from paceline.control.journal.labels import LABELS_FILE
from paceline.control.journal.reader import STARTING, RunReader, StepRecord
from paceline.control.messages.plan import PlanStart
from paceline.watch import status
from paceline.watch.look import QUIET_S, look_at, speed
from tests.watch.samples import EPOCH, START, Writer, a_whole_run, step, writing
from tests.watch.screens import drawn


def never_started(writer: Writer) -> None:
    """Made, but nothing was said yet."""


def live(writer: Writer) -> None:
    a_whole_run(writer)


def ended(writer: Writer) -> None:
    a_whole_run(writer)
    writer.say("ended", "all members reached the end", ended=str(START + 60))


def failed(writer: Writer) -> None:
    a_whole_run(writer)
    writer.say("failed", "Traceback\n  in train\nValueError: [bold]no[/bold] \x1b[2J such file", ended=str(START + 60))


def interrupted(writer: Writer) -> None:
    a_whole_run(writer)
    writer.say("interrupted", "its coordinator ended; start the run again to go on")


@pytest.mark.parametrize("prepare", [never_started, live, ended, failed, interrupted])
def test_every_state_is_plain_json_and_a_table(prepare: Callable[[Writer], None], tmp_path: Path) -> None:
    with writing(tmp_path, has_clock=True) as writer:
        prepare(writer)
        with RunReader(tmp_path) as reader:
            values = status.as_json(reader)
            assert json.loads(json.dumps(values, allow_nan=False)) == values
            state = "running" if prepare is live else prepare.__name__.replace("_", " ").replace("never", "not")
            assert values["run"]["state"] == state
            for width in (10, 40, 120):
                text = drawn(reader, width)
                assert "\x1b" not in text
                assert all(len(line) <= width for line in text.splitlines())
            assert state in text


def test_what_the_json_says(tmp_path: Path) -> None:
    with writing(tmp_path, has_clock=True) as writer:
        ended(writer)
        with RunReader(tmp_path) as reader:
            values: dict[str, Any] = status.as_json(reader)
    run = values["run"]
    assert (run["name"], run["started"], run["elapsed_s"]) == ("digits", START, 60.0)
    assert (run["epoch"], run["step"], run["operation"]) == (1, 8, 8)
    assert run["cursor"] == {"epoch": 1, "position": 100}
    assert (run["loss"], run["generation"]) == (0.0625, 1)
    assert run["remaining_s"] is None
    first, second = values["members"]
    assert (first["id"], first["pid"], first["host"]) == ("aaaaaaaaaaaaaaaa", 4711, "lab-1")
    assert (first["rank"], first["share"], first["state"]) == (0, 16, "active")
    assert (first["samples_per_s"], first["step_s"]) == (120.0, 0.25)
    assert (second["rank"], second["share"], second["state"]) == (None, None, "dead")
    assert [event["kind"] for event in values["events"]] == ["joined", "joined", "plan", "dead", "plan"]


def test_a_run_without_figures_is_shown_without_what_follows_from_them(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.journal.record(run={"status": "running", "fact/dataset_length": "many"})
        writer.steps(2, EPOCH[:1])
        with RunReader(tmp_path) as reader:
            run = status.as_json(reader)["run"]
            assert (run["name"], run["step"], run["epoch"]) == (tmp_path.name, 1, 2)
            assert run["dataset_length"] is run["num_epochs"] is run["remaining_s"] is None
            assert "epoch 3  step 1" in drawn(reader)


def test_the_length_of_the_data_is_also_told_by_the_fact_about_it(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, RunReader(tmp_path) as reader:
        writer.journal.record(run={"status": "running", "fact/the data": "1797 samples, fingerprint 12ab"})
        assert status.as_json(reader)["run"]["dataset_length"] == 1797
        writer.journal.record(run={"fact/the data": "a stream"})
        assert status.as_json(reader)["run"]["dataset_length"] is None


def test_what_is_left_is_told_from_speed_and_cursor(tmp_path: Path) -> None:
    with writing(tmp_path, has_clock=True) as writer, RunReader(tmp_path) as reader:
        writer.say("running")
        writer.steps(0, EPOCH[:2])
        look = look_at(reader, writer.now)
        assert look.samples_per_s == 32.0
        assert look.remaining_s == (3 * 100 - 64) / 32.0
        assert look.quiet_s == 0.0
        assert look_at(reader, writer.now + 2 * QUIET_S).quiet_s == 2 * QUIET_S


def test_speed_counts_lots_of_one_time_over_the_time_between_them() -> None:
    def lot(first: int, at: float) -> list[StepRecord]:
        rows = [step(first + number, 0, 10) for number in range(3)]
        return [msgspec.structs.replace(row, time=START + at, seconds=0.5) for row in rows]

    assert speed([]) == 0.0
    assert speed(lot(1, 0)) == 30 / 1.5, "of one lot only the times of its steps are known"
    assert speed(lot(1, 0) + lot(4, 2)) == 30 / 2.0
    assert speed(lot(1, 0) + lot(4, 100) + lot(7, 102)) == 30 / 2.0, "what is long ago does not count"
    assert speed([msgspec.structs.replace(step(1, 0, 10), seconds=0.0)]) == 0.0


def test_a_coordinator_that_is_gone_is_said(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-S", "-c", ""])
    gone.wait()
    with writing(tmp_path, has_clock=True) as writer, RunReader(tmp_path) as reader:
        writer.say("running")
        writer.steps(0)
        assert not status.as_json(reader)["run"]["coordinator_is_gone"], "nobody knows"
        (tmp_path / LOCK_FILE).write_text(f"{gone.pid}\n")
        assert status.as_json(reader)["run"]["coordinator_is_gone"]
        assert "its coordinator is gone" in " ".join(drawn(reader).split())
        assert not look_at(reader, writer.now).is_deserted, "there was news just now"
        (tmp_path / LOCK_FILE).write_text("1\n")
        assert not status.as_json(reader)["run"]["coordinator_is_gone"]


def test_very_many_members_are_counted_not_listed(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.say("running")
        for number in range(50):
            writer.member(f"{number:016}", number)
        with RunReader(tmp_path) as reader:
            text = drawn(reader)
            assert len(status.as_json(reader)["members"]) == 50
    assert "... and 30 more" in text
    assert "lab-1" in text
    assert text.count("lab-1") == 20


def test_a_last_state_that_is_not_saved_is_shown_until_the_run_goes_on(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        ended(writer)
        writer.event("not saved", "aaaaaaaaaaaaaaaa", "the state after operation 8 is in no checkpoint")
        with RunReader(tmp_path) as reader:
            assert status.as_json(reader)["run"]["not_saved"] == "the state after operation 8 is in no checkpoint"
            assert "\nnot saved: the state after operation 8 is in no checkpoint" in drawn(reader)
        writer.plan("aaaaaaaaaaaaaaaa", start=PlanStart.FOUND, base=4)
        with RunReader(tmp_path) as reader:
            assert status.as_json(reader)["run"]["not_saved"] is None


def test_what_goes_into_a_pipe_is_not_wrapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(f"word-{number}" for number in range(30))
    with writing(tmp_path) as writer:
        ended(writer)
        writer.event("warning", "aaaaaaaaaaaaaaaa", text)
        with RunReader(tmp_path) as reader:
            monkeypatch.delenv("COLUMNS", raising=False)
            status.render(reader, status.console_here())
            lines = capsys.readouterr().out.splitlines()
            monkeypatch.setenv("COLUMNS", "60")
            status.render(reader, status.console_here())
            narrow = capsys.readouterr().out.splitlines()
    assert any(line.endswith(text) for line in lines)
    assert not any(line.endswith("  ") for line in lines), "nor filled up"
    assert max(map(len, narrow)) <= 60


def test_processes_that_have_not_joined_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def starting(*processes: tuple[str, int, bool]) -> dict[str, str]:
        return {STARTING: json.dumps(processes)}

    with writing(tmp_path) as writer:
        a_whole_run(writer)
        (tmp_path / LOCK_FILE).write_text(str(os.getpid()))
        (tmp_path / LABELS_FILE).write_text(json.dumps({"slots": {"w1": [2, 4711], "s0": [5]}}))
        writer.say("running", **starting(("agent", 4711, False), ("other", 5, True)))
        with RunReader(tmp_path) as reader:
            assert "being started: worker (process 4711 on lab-1), server s0 (process 5)" in drawn(reader)
            assert status.as_json(reader)["run"]["starting"] == [
                {"role": "worker", "pid": 4711, "label": "", "host": "lab-1"},
                {"role": "server", "pid": 5, "label": "s0", "host": ""},
            ]
        monkeypatch.setattr("platform.node", lambda: "lab-1")
        with RunReader(tmp_path) as reader:
            assert "being started: worker w1 (process 4711 on lab-1)" in drawn(reader)
        writer.say("ended")
        with RunReader(tmp_path) as reader:
            assert "being started" not in drawn(reader)


def test_workers_of_this_machine_are_called_as_their_output_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of others the id is shown: their slots are numbered on their own machine."""
    name = "ab" * 8
    with writing(tmp_path) as writer:
        writer.say("running")
        writer.member(name, rank=0)
        writer.event("dead", name, "it was killed")
        (tmp_path / LABELS_FILE).write_text(json.dumps({"slots": {"w1": [2, 4711]}}))
        for host, label in (("lab-1", "w1"), ("lab-2", name[:8])):
            monkeypatch.setattr("platform.node", lambda host=host: host)
            with RunReader(tmp_path) as reader:
                shown = drawn(reader)
            assert f"died worker {label}: it was killed" in shown
            assert any(line.split()[:2] == ["0", label] for line in shown.splitlines())
