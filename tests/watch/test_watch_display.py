"""Following a run: what is shown, and that nothing that happens to the database or the output ends it badly."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from paceline.control.journal.journal import DATABASE
from paceline.control.messages.plan import PlanStart
from paceline.watch.display import RunConsole, watch
from paceline.watch.follower import Follower
from paceline.watch.lines import Lines
from paceline.watch.live import picture
from paceline.watch.look import Look
from tests.watch.samples import EPOCH, START, a_whole_run, writing
from tests.watch.screens import watching


def test_a_terminal_gets_header_members_and_events(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        with watching(tmp_path) as shown:
            shown.see("digits running epoch 2/3 (100%) step 8 loss 0.0625")
            shown.see("aaaaaaaa active 120 16 lab-1 250 ms 4711")
            shown.see("rank worker state samples/s share host step time pid")
            shown.see("gone: 1 died")
            shown.see("died worker bbbbbbbb: process 2 was killed by signal 9")
            shown.see("plan: generation 2 (recover): aaaaaaaa")
            writer.event("checkpoint", "", "step-000000008-op-8")
            shown.see("checkpoint: step-000000008-op-8")
            writer.say("ended", "all members reached the end", ended=str(START + 75))
            last = shown.stop()
    assert "ended" in last.rsplit("digits", 1)[1], "the last state is shown once more"
    assert "\x1b[?25h" in shown.output.getvalue(), "the cursor is back"


def test_what_is_printed_through_the_console_stays_above(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        with watching(tmp_path) as shown:
            shown.see("digits running")
            shown.console.print("worker 0 says hello")
            shown.see("worker 0 says hello")
            last = shown.stop()
    assert last.index("worker 0 says hello") < last.rindex("digits")


def test_elsewhere_there_are_lines_without_control_characters(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, watching(tmp_path, terminal=False, width=20) as shown:
        a_whole_run(writer)
        writer.event("warning", "aaaaaaaaaaaaaaaa", "\x1b[2J[red]careful[/red]\nof\rthis\x07")
        shown.see("warning aaaaaaaa: [2J[red]careful[/red] of this")
        writer.say("ended", ended=str(START + 75))
        text = shown.stop()
    assert shown.output.getvalue() == text
    assert all(letter.isprintable() or letter == "\n" for letter in text)
    lines = text.splitlines()
    for said in (
        "joined worker aaaaaaaa",
        "joined worker bbbbbbbb",
        "died worker bbbbbbbb",
        "plan: generation 1",
        "plan: generation 2",
    ):
        assert sum(said in line for line in lines) == 1, said
    assert "digits ended, epoch 2/3 (100%), step 8, loss 0.0625" in lines[-1]


def test_plain_can_be_asked_for_on_a_terminal(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        with watching(tmp_path, plain=True) as shown:
            shown.see("digits running, epoch 2/3")
            shown.stop()
    assert "\x1b" not in shown.output.getvalue()


@pytest.mark.parametrize("plain", [False, True])
def test_a_run_that_is_not_there_yet_is_waited_for(tmp_path: Path, plain: bool) -> None:
    folder = tmp_path / "later"
    with watching(folder, plain=plain, width=200) as shown:
        shown.see(f"there is no run in {folder} yet")
        folder.mkdir()
        (folder / DATABASE).touch()
        shown.see("the run is being prepared")
        with writing(folder) as writer:
            writer.say("gathering")
            shown.see("digits gathering")


@pytest.mark.parametrize("plain", [False, True])
def test_damage_is_told_and_a_replacement_is_found(tmp_path: Path, plain: bool) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
    with watching(tmp_path, plain=plain) as shown:
        shown.see("died worker bbbbbbbb")
        damaged = tmp_path / "damaged"
        damaged.write_bytes(os.urandom(8192))
        os.replace(damaged, tmp_path / DATABASE)
        shown.see("file is not a database")
        for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"):
            (tmp_path / name).unlink(missing_ok=True)
        with writing(tmp_path) as writer:
            writer.event("joined", "cccccccccccccccc", "process 3 on lab-3")
            writer.say("gathering")
            shown.see("joined cccccccc: process 3 on lab-3")


def test_a_coordinator_that_restarts_is_followed(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        operation = writer.operation
    with watching(tmp_path) as shown:
        shown.see("step 8")
        with writing(tmp_path) as writer:
            writer.say("interrupted", "its coordinator ended")
            shown.see("digits interrupted")
        with writing(tmp_path) as writer:
            writer.generation, writer.operation = 2, operation
            writer.say("running")
            writer.plan("aaaaaaaaaaaaaaaa", start=PlanStart.RECOVER, base=operation)
            writer.steps(2, EPOCH[:1])
            shown.see("running epoch 3/3 (32%) step 9")


def test_a_database_that_is_locked_is_read_when_it_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.control.journal.reader.BUSY_S", 0.01)
    with writing(tmp_path) as writer:
        a_whole_run(writer)
    holder = sqlite3.connect(tmp_path / DATABASE, isolation_level=None)
    try:
        holder.execute("PRAGMA locking_mode = EXCLUSIVE")
        holder.execute("BEGIN EXCLUSIVE")
        with watching(tmp_path, width=200) as shown:
            shown.see("database is locked")
            holder.execute("COMMIT")
            holder.close()
            shown.see("digits running")
    finally:
        holder.close()


def test_while_it_cannot_be_read_the_last_state_stays(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
    with watching(tmp_path) as shown:
        shown.see("digits running")
        (tmp_path / "noise").write_bytes(b"no database" * 1000)
        (tmp_path / "noise").replace(tmp_path / DATABASE)
        shown.see("file is not a database")
        last = shown.stop()
    assert "digits" in last[last.rindex("file is not a database") - 2000 :]


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (40, 12), (12, 5), (1, 1)])
def test_very_many_members_fit_on_any_screen(tmp_path: Path, width: int, height: int) -> None:
    with writing(tmp_path) as writer:
        writer.say("running")
        for rank in range(100):
            writer.member(f"{rank:016}", rank)
        writer.plan(*(f"{rank:016}" for rank in range(100)), start=PlanStart.FOUND, base=0)
        writer.steps(0, EPOCH[:2])
        with contextlib.closing(Follower(tmp_path)) as follower:
            look = follower.look()
        with watching(tmp_path, width=width, height=height) as shown:
            if width >= 40:
                shown.see("... and 80 more" if height > 40 else "... and")
            last = shown.stop()
    assert all(len(line) <= width for line in last.replace("\r", "\n").splitlines())
    assert isinstance(look, Look)
    lines = shown.console.render_lines(picture(look, width, height))
    if width >= 80:
        assert len(lines) <= height
        listed = sum("lab-1" in "".join(part.text for part in line) for line in lines)
        assert listed == (20 if height == 60 else 17)


def test_it_writes_nothing_into_the_folder(tmp_path: Path) -> None:
    def contents() -> dict[str, bytes]:
        # The shared memory beside the log is where readers say up to where they read; it holds no data.
        return {path.name: path.read_bytes() for path in tmp_path.iterdir() if not path.name.endswith("-shm")}

    with writing(tmp_path) as writer:
        a_whole_run(writer)
        before = contents()
        with watching(tmp_path) as shown:
            shown.see("step 8")
        assert contents() == before


class Broken(io.StringIO):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SystemExit(1)], ids=["full", "exit"])
@pytest.mark.parametrize("plain", [False, True])
def test_an_output_that_fails_ends_the_display_and_nothing_else(
    tmp_path: Path, plain: bool, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    console = Console(file=Broken(error), force_terminal=True, width=80, height=24)
    with caplog.at_level(logging.ERROR, "paceline.watch"):
        watch(tmp_path, threading.Event(), plain=plain, console=console, interval_s=0.01)
    assert "the run goes on" in caplog.text


@pytest.mark.parametrize("plain", [False, True])
def test_a_reader_that_went_away_makes_it_quiet(tmp_path: Path, plain: bool, caplog: pytest.LogCaptureFixture) -> None:
    console = RunConsole(file=Broken(BrokenPipeError(32, "Broken pipe")), force_terminal=True, width=80, height=24)
    stop = threading.Event()
    stop.set()
    watch(tmp_path, stop, plain=plain, console=console, interval_s=0.01)
    console.print("output of a worker")
    assert console.quiet
    assert not caplog.records


def lines_with_clock() -> tuple[Lines, list[str], Callable[[float], None]]:
    written: list[str] = []
    at = [0.0]

    def turn(seconds: float) -> None:
        at[0] += seconds

    return Lines(written.append, lambda: at[0], every_s=5.0), written, turn


def test_progress_is_written_now_and_then(tmp_path: Path) -> None:
    lines, written, turn = lines_with_clock()
    with writing(tmp_path) as writer, contextlib.closing(Follower(tmp_path)) as follower:

        def show() -> list[str]:
            written.clear()
            lines.show(follower.look(), follower.take_events())
            return list(written)

        writer.say("running")
        assert len(show()) == 1
        assert show() == []
        writer.steps(0, ((0, 2),))
        turn(1.5)
        assert show() == [], "not a tenth of the epoch"
        turn(4.0)
        assert len(show()) == 1, "but some seconds"
        turn(100.0)
        assert show() == [], "nothing moved"
        writer.steps(0, ((2, 30),))
        turn(1.5)
        assert len(show()) == 1, "a tenth"
        writer.steps(0, ((32, 32),))
        turn(0.5)
        assert show() == [], "another one, but too soon"
        writer.say("fencing")
        assert "fencing" in show()[0], "another state is told at once"


def test_of_a_long_log_only_the_last_events_are_written(tmp_path: Path) -> None:
    lines, written, _ = lines_with_clock()
    with writing(tmp_path) as writer, contextlib.closing(Follower(tmp_path)) as follower:
        for number in range(30):
            writer.event("joined", f"{number:016}", f"process {number}")
        lines.show(follower.look(), follower.take_events())
        assert written[0] == "... 20 earlier events"
        assert len(written) == 12
        for number in range(15):
            writer.event("dead", f"{number:016}", f"process {number}")
        written.clear()
        found = follower.look()
        assert isinstance(found, Look)
        lines.show(found, follower.take_events())
        assert len(written) == 15, "what happens while it is watched is written, all of it"
