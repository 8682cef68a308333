"""`launch`: results in order, the root cause as an exception, nothing left."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import cast

import pytest

from paceline import engine
from paceline.engine import folders, launch, task, worker
from paceline.engine.events import RunOutcome, RunResult
from paceline.engine.folders import ClaimedFolder
from paceline.engine.running import code_of
from paceline.errors import LaunchFailed
from paceline.watch.losses import Shortfall
from tests.engine import tasks

launching = importlib.import_module("paceline.engine.launch")  # the package has a function of this name

SOURCE = str(Path(engine.__file__).resolve().parents[2])


def test_results_come_in_order_from_other_processes(tmp_path: Path) -> None:
    results = launch(tasks.rank_times, 10, workers=3, folder=tmp_path)
    assert [value for value, _ in results] == [0, 10, 20]
    pids = {pid for _, pid in results}
    assert len(pids) == 3
    assert os.getpid() not in pids


def test_servers_may_stand_beside_the_workers(tmp_path: Path) -> None:
    results = launch(tasks.rank_times, 10, workers=2, servers=1, name="a", folder=tmp_path)
    assert [value for value, _ in results] == [0, 10], "servers have no result"
    assert (tmp_path / "a" / "logs" / "s0.log").exists()
    with pytest.raises(ValueError, match="each replica needs its own server"):
        launch(tasks.rank_times, 10, servers=1, replicas=2, name="b", folder=tmp_path)
    assert not (tmp_path / "b").exists()


def test_the_root_cause_is_raised_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match="rank 1 lost it") as caught:
        launch(tasks.fail_on, 1, workers=3, folder=tmp_path)
    (note,) = caught.value.__notes__
    assert "raised by w1" in note
    assert "in fail_on" in note


def test_an_error_that_cannot_travel_is_told(tmp_path: Path) -> None:
    with pytest.raises(LaunchFailed, match=r"(?s)w0 .*exited with code 1.*Unportable: 1 and 2\nlogs: "):
        launch(tasks.fail_strangely, workers=1, folder=tmp_path)
    with pytest.raises(LaunchFailed, match="was killed by SIGKILL"):
        launch(tasks.die, workers=1, folder=tmp_path)
    with pytest.raises(Exception, match="lambda"):
        launch(tasks.return_unportable, workers=1, folder=tmp_path)


def test_it_works_on_any_thread(tmp_path: Path) -> None:
    results: list[int] = []

    def run() -> None:
        results.extend(value for value, _ in launch(tasks.rank_times, 1, workers=2, folder=tmp_path))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60.0)
    assert results == [0, 1]


def test_a_function_that_cannot_travel_is_refused_before_anything_starts(tmp_path: Path) -> None:
    lock = threading.Lock()
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        launch(lambda: lock.locked(), workers=1, folder=tmp_path)
    with pytest.raises(ValueError, match="cannot be sent to other processes"):
        launch(tasks.fail_on, lock, workers=1, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_cloudpickle_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ValueError, match="install cloudpickle"):
        task.pack(lambda: 0, ())


def run_python(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SOURCE}
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=90,
        cwd=folder,
        env=environment,
        check=False,
    )


def test_a_function_of_the_main_script_and_a_missing_guard(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        textwrap.dedent(
            """
            import os, sys

            class Answer:
                def __init__(self, rank):
                    self.rank = rank

            def work():
                return Answer(int(os.environ["RANK"]))

            if __name__ == "__main__" or "unguarded" in sys.argv:
                from paceline.engine import launch

                print([type(answer) is Answer and answer.rank for answer in launch(work, workers=int(sys.argv[1]))])
            """
        )
    )
    good = run_python(tmp_path, "main.py", "2")
    assert good.stdout == "[0, 1]\n", good.stderr
    wrong = run_python(tmp_path, "main.py", "1", "unguarded")
    assert wrong.returncode == 1
    assert "put the call under `if __name__ == '__main__':`" in wrong.stderr


def test_a_function_of_an_interactive_session_travels_by_value(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    typed = """
        import os
        from paceline.engine import launch
        def work(add):
            return int(os.environ["RANK"]) + add

        print(launch(work, 5, workers=2))
        """
    done = run_python(tmp_path, "-c", textwrap.dedent(typed))
    assert done.stdout == "[5, 6]\n", done.stderr


def test_what_a_lost_worker_raised_is_no_value(caplog: pytest.LogCaptureFixture) -> None:
    results = launching.LaunchResults(b"task")
    try:
        for slot in range(3):
            results.attach(slot)
        left = [
            (worker.RETURNED, 7),
            (worker.RAISED, ValueError("another model"), "Traceback\nValueError: another model"),
        ]
        for place, one in zip(results._places.values(), left, strict=False):
            worker.write(place.fileno(), pickle.dumps(one))
        ended = RunOutcome(RunResult.ENDED, 0)
        assert launching._conclude(ended, [], results, cast(ClaimedFolder, None), 3) == [7, None, None]
    finally:
        results.close()
    assert "w1 returned nothing, it raised: ValueError: another model" in caplog.text


def test_a_strict_run_that_ends_without_a_worker_has_failed(tmp_path: Path) -> None:
    results = launching.LaunchResults(b"task")
    place = folders.claim(tmp_path, "a")
    try:
        ended = RunOutcome(RunResult.ENDED, 3, missing=("w1 was refused: another model",))
        with pytest.raises(LaunchFailed, match="a ended without a worker that it was asked to have: w1 was refused"):
            launching._conclude(ended, [], results, place, 2)
    finally:
        place.close()
        results.close()


LOSS = "2 updates, 16 samples, of parameters whose last copy died with a server"


@pytest.mark.parametrize("strict", [False, True])
def test_what_was_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], strict: bool
) -> None:
    monkeypatch.setattr("paceline.engine.running.find_shortfall", lambda _, had_record: Shortfall(LOSS))
    if strict:
        with pytest.raises(LaunchFailed, match=f"the run a has ended, but lost: {LOSS}; logs: "):
            launch(tasks.rank_times, 1, workers=1, name="a", folder=tmp_path, strict=True)
    else:
        assert launch(tasks.rank_times, 1, workers=1, name="a", folder=tmp_path)[0][0] == 0
    assert (f"paceline: the run a has ended\nlost: {LOSS}" in capfd.readouterr().err) is not strict


def test_a_run_whose_last_state_is_not_saved_has_an_exit_code_of_its_own() -> None:
    ended, interrupted = RunOutcome(RunResult.ENDED, 0), RunOutcome(RunResult.INTERRUPTED, 143)
    assert code_of(ended, Shortfall()) == 0
    assert code_of(ended, Shortfall(unsaved="no room")) == 78
    assert code_of(ended, Shortfall(LOSS, "no room")) == 77
    assert code_of(interrupted, Shortfall(unsaved="no room")) == 143
