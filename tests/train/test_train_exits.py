"""How a script that runs alone ends: with its own exit code, at once, and with nothing left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.train.endings import exit_under_way

# Imports once for all; each script then is the main module of a forked interpreter, which ends as one does.
DRIVER = """
import json, os, sys
import torch, torch._dynamo, paceline.train.session

script, folder, *endings = sys.argv[1:]
started = {}
for ending in endings:
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(f"{folder}/{ending}.err", os.O_WRONLY | os.O_CREAT), 2)
        sys.argv = [script, ending, f"{folder}/{ending}"]
        with open(script) as file:
            source = file.read()
        exec(compile(source, script, "exec"))
        sys.exit()
    started[ending] = pid
codes = {ending: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for ending, pid in started.items()}
print(json.dumps(codes), flush=True)
"""

SCRIPT = """
import os, sys, time, torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
from paceline.train.session import LoaderOptions, Session
from paceline.train.saving import Checkpoints

ending, folder = sys.argv[1:]
model = torch.nn.Linear(4, 2)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
session = Session(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    data=data,
    global_batch=8,
    loader=LoaderOptions(num_workers=2 if ending == "end" else 0),
    checkpoints=Checkpoints(folder=folder, every_s=None, resume=True),
)
for epoch in session.epochs(1000 if ending == "signal" else 2):
    for batch in epoch:
        session.step(lambda x, y: F.cross_entropy(model(x), y), batch)
        if session.steps == 3:
            if ending == "signal":
                print(os.getpid(), flush=True)
            if ending == "error":
                raise ArithmeticError("enough")
            if ending == "exit":
                sys.exit(3)
            if ending == "raise":
                raise SystemExit(3)
            if ending == "caught":
                try:
                    raise SystemExit(3)
                except SystemExit as error:
                    kept = error
                break
    if ending == "caught":
        break


def validate(*_):
    raise SystemExit(3)


if ending == "validate":
    session.evaluate(validate, data)
"""


ENDINGS = {"end": 0, "error": 1, "exit": 3, "raise": 3, "validate": 3, "caught": 0, "signal": 128 + signal.SIGTERM}


def test_every_ending_of_a_script_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # As many threads as torch takes by itself: loader workers are forked from a process that may have several.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-c", DRIVER, str(script), str(tmp_path), *ENDINGS]
    driver = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert driver.stdout is not None
        os.kill(int(driver.stdout.readline()), signal.SIGTERM)
        codes = json.loads(driver.communicate(timeout=100.0)[0])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.communicate()
    said = {ending: (tmp_path / f"{ending}.err").read_text() for ending in codes}
    assert codes == ENDINGS, said
    assert "ArithmeticError: enough" in said["error"]
    # Also loader workers, forked from a process that has a session, end without a word.
    assert all(not text for ending, text in said.items() if ending != "error"), said
    kept = {ending: list((tmp_path / ending).glob("*/")) for ending in codes}
    assert kept["end"], "what came out is saved"
    assert kept["signal"]
    assert kept["caught"]
    for ending in ("error", "exit", "raise", "validate"):
        assert not kept[ending], "what a script in error leaves is not taken for its end"


class Looped:
    """A loop whose iterator looks for an exit when it is closed."""

    def __init__(self) -> None:
        self.found: SystemExit | None = None

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(3)
        except GeneratorExit:
            self.found = exit_under_way()
            raise


def raise_inside() -> None:
    with contextlib.suppress(KeyError):  # it is caught and raised again on its way
        raise SystemExit(3)


def raise_at_once() -> None:
    raise SystemExit(3)


@pytest.mark.parametrize("leave", [raise_at_once, raise_inside])
def test_an_exit_that_leaves_a_loop_is_seen_there(leave: Callable[[], None]) -> None:
    loop = Looped()

    def script() -> None:
        for _ in zip(loop, "abc", strict=True):  # behind another iterator
            leave()

    with contextlib.suppress(SystemExit):
        script()
    assert loop.found is not None
    assert loop.found.code == 3


class Keeper:
    error: SystemExit


def test_an_exit_that_was_made_or_caught_before_is_not_taken_for_one() -> None:
    loop = Looped()
    made, keeper = SystemExit(3), Keeper()
    for _ in loop:
        try:
            raise SystemExit(3)
        except SystemExit as error:
            caught = error
        try:
            raise SystemExit(3)
        except SystemExit as error:
            keeper.error = error
        break
    assert made
    assert caught
    assert loop.found is None
    with contextlib.suppress(ArithmeticError):
        for _ in loop:
            raise ArithmeticError
    assert loop.found is None
