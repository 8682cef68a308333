"""What is seen of a run that a real coordinator keeps."""

from __future__ import annotations

import io
import threading
from pathlib import Path

from rich.console import Console

from paceline.control.journal.reader import RunReader
from paceline.testing.eventually import eventually
from paceline.watch import status
from paceline.watch.display import watch
from paceline.watch.history import losses
from tests.control.helpers import new_config, serving, training


def test_a_run_is_followed_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    console, stop = Console(file=io.StringIO(), force_terminal=False, width=500), threading.Event()
    thread = threading.Thread(
        target=watch, args=(folder, stop), kwargs={"console": console, "interval_s": 0.02}, name="paceline-watch"
    )
    thread.start()

    def text() -> str:
        return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]

    try:
        with serving(new_config(folder, wanted=3, grace_s=60.0)) as running:
            with training(running.ticket, 3, num_steps=300, pace_s=0.005) as (first, second, third):
                eventually(lambda: "test running" in text(), "the run is shown")
                with RunReader(folder) as reader:
                    eventually(lambda: len(losses(reader).operations) > 20, "steps are recorded")
                    members = status.as_json(reader)["members"]
                assert {member["id"] for member in members} == {first.name, second.name, third.name}
                third.vanish()
                eventually(lambda: f"died worker {third.name[:8]}" in text(), "the death is shown")
                for trainee in (first, second):
                    assert trainee.exited.wait(30.0)
            assert running.join() == 0
    finally:
        stop.set()
        thread.join(30.0)
    assert "(recover)" in text()
    assert "test ended" in text().splitlines()[-1]
    assert "\x1b" not in text()
    with RunReader(folder) as reader:
        assert status.as_json(reader)["run"]["state"] == "ended"
