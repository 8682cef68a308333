"""Workers whose data or model differ: before the run has begun, and of one that takes another's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.testing.eventually import eventually
from tests.engine.commands import completed, paceline, write_script

pytestmark = pytest.mark.timeout(180)

# Trains until there is a file `enough`. `SEED` and `OUT` are what each script makes of them.
TRAINING = """
import math, os, signal
import torch
import paceline
from torch import nn

{before}
torch.manual_seed(SEED)
data = torch.utils.data.TensorDataset(torch.randn(40, 4))
torch.manual_seed(0)
model = nn.Linear(4, OUT)
session = paceline.Session(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    data=data,
    global_batch=8,
    checkpoints=paceline.Checkpoints(every_s=None),
)
for epoch in session.epochs(100_000):
    for batch in epoch:
        session.step(lambda x: model(x).square().mean(), batch)
        {after}
    if session.should_stop(math.inf if os.path.exists("enough") else -session.steps, patience=0):
        break
session.close()
"""


def training(folder: Path, before: str, after: str = "pass") -> str:
    return write_script(folder, TRAINING.format(before=before, after=after))


@pytest.mark.parametrize(
    ("before", "difference", "cause"),
    [
        ("SEED, OUT = os.getpid(), 4", "the data's fingerprint is", "is the data random? seed it"),
        ("SEED, OUT = 1, 4 + int(os.environ['RANK'])", "parameter 0 is", "build its model from something"),
    ],
)
def test_workers_that_differ_from_the_first_end_the_run_before_it_begins(
    tmp_path: Path, before: str, difference: str, cause: str
) -> None:
    (tmp_path / "enough").touch()
    code, out, err = completed(tmp_path, "run", "-n", "2", "--name", "a", training(tmp_path, before))
    assert code == 1, out + err
    last = err[err.index("paceline: the run a failed") :]
    assert "the workers do not fit together: worker " in last
    assert last.count("(process ") >= 2, "both sides are named"
    assert difference in last
    assert cause in last
    assert "started again" not in out + err


@pytest.mark.parametrize("options", [(), ("--strict",)])
def test_a_replacement_that_differs_is_told_and_the_end_says_so(tmp_path: Path, options: tuple[str, ...]) -> None:
    """Worker 1 is killed in step 3; who takes its place reads other data."""
    before = "SEED, OUT = (2 if os.path.exists('changed') else 1), 4"
    after = (
        "if session.steps == 3 and os.environ['RANK'] == '1': open('changed', 'w'); "
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    script = training(tmp_path, before, after)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", *options, script) as command:
        eventually(lambda: "w1 was refused: the data's fingerprint is" in command.out + command.err, "the refusal")
        (tmp_path / "enough").touch()
        assert command.wait() == (3 if options else 0), command.err
        said = command.out + command.err
        assert said.count("it is started again") == 1, "after the kill, and not after the refusal"
        assert "paceline: the run a ended without a worker that it was asked to have: w1 was refused" in command.err


def test_a_script_that_exits_with_a_code_on_one_worker_is_one_that_failed(tmp_path: Path) -> None:
    """The others go on; they are not told that this worker came to the end."""
    before = "SEED, OUT = 1, 4"
    after = "if session.steps == 3 and os.environ['RANK'] == '1': sys.exit(3)"
    script = training(tmp_path, f"import sys\n{before}", after)
    with paceline(tmp_path, "run", "-n", "2", "--name", "a", "--restarts", "0", script) as command:
        eventually(lambda: "w1 exited with code 3" in command.out + command.err, "its end")
        (tmp_path / "enough").touch()
        assert command.wait() == 0, command.err
        assert "Mismatch" not in command.out + command.err
        assert "ended without a worker that it was asked to have: w1 exited with code 3" in command.err


def test_a_script_that_ends_in_order_on_one_worker_is_told_as_that(tmp_path: Path) -> None:
    after = "if session.steps == 3 and os.environ['RANK'] == '1': raise SystemExit(0)"
    code, _, err = completed(tmp_path, "run", "-n", "2", "--name", "a", training(tmp_path, "SEED, OUT = 1, 4", after))
    assert code == 1
    last = err[err.index("paceline: the run a failed") :]
    assert (
        "the script ended on this worker after operation 3, by SystemExit with code 0, and the others went on" in last
    )
    assert "Mismatch" not in last


def test_a_code_that_the_script_catches_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "enough").touch()
    caught = "def caught():\n    try:\n        sys.exit(3)\n    except SystemExit:\n        pass"
    script = training(tmp_path, f"import sys\nSEED, OUT = 1, 4\n{caught}", "caught()")
    code, out, err = completed(tmp_path, "run", "-n", "2", "--name", "a", script)
    assert code == 0, out + err
