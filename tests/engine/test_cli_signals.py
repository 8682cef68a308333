"""SIGTERM or SIGINT to all processes of a run at once, as systemd, Slurm and `timeout` end a job: whoever gets it
first, the step is finished, a checkpoint is written, the exit code says "interrupted", and the run goes on exactly from
there.

The model counts its samples: each update adds one to the weight of every sample in it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.custody.names import find
from paceline.testing.eventually import eventually
from tests.engine.commands import Command, completed, paceline, write_script

LENGTH = 96
TRAINING = """
import json, os, sys, time, torch
from torch import nn
from torch.utils.data import Dataset
from paceline.train.saving import Checkpoints
from paceline.train.session import LoaderOptions, Session

class Numbered(Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return index

class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(96))

num_epochs, strategy, consistency, loaders = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
model = Counts()
session = Session(
    model,
    torch.optim.SGD(model.parameters(), lr=8.0),
    data=Numbered(),
    global_batch=8,
    strategy=strategy,
    consistency=consistency,
    loader=LoaderOptions(num_workers=loaders),
    checkpoints=Checkpoints(folder=os.environ.get("ALONE"), every_s=None, resume="ALONE" in os.environ),
)

def loss_fn(indices):
    time.sleep(0.005)
    return -model.weight[indices].mean()

for epoch in session.epochs(num_epochs):
    for batch in epoch:
        session.step(loss_fn, batch)
        if os.environ.get("ALONE"):
            print("step", session.steps, flush=True)
session.evaluate(lambda indices: {"n": 1.0}, Numbered())
if session.is_main:
    with open("counts", "w") as file:
        json.dump(model.weight.tolist(), file)
"""
ENDLESS = 10**6
KINDS = ("coordinator", "agent", "workers", "servers", "loaders")
MODES = {"all-reduce": ("allreduce", "sync"), "servers": ("server", "sync"), "async": ("server", "async")}


class Case(NamedTuple):
    """Who gets the signal, in which order and how far apart."""

    number: signal.Signals
    order: tuple[str, ...]
    mode: str
    loaders: int
    gap_s: float
    steps: int

    def __str__(self) -> str:
        gap = f"-{self.gap_s}s" if self.gap_s else ""
        return f"{self.number.name}-{'-'.join(self.order)}-{self.mode}-{self.loaders}loaders{gap}-{self.steps}steps"


def cases(seed: int, count: int) -> list[Case]:
    dice = random.Random(seed)
    found: list[Case] = []
    # Each mode, and each kind of process as the first, comes about equally often.
    modes, firsts = itertools.cycle(MODES), itertools.cycle(KINDS)
    while len(found) < count:
        mode, first, loaders = next(modes), next(firsts), dice.choice([0, 1, 2])
        kinds = [
            kind for kind in KINDS if (kind != "servers" or mode != "all-reduce") and (kind != "loaders" or loaders)
        ]
        if first not in kinds:
            continue
        dice.shuffle(kinds)
        order = (first, *(kind for kind in kinds if kind != first))
        number = dice.choice([signal.SIGTERM, signal.SIGINT])
        found.append(
            Case(number, order, mode, loaders, dice.choice([0.0, 0.0, 0.02, 0.2]), dice.choice([1, 5, 12, 30]))
        )
    return found


def parent_of(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def processes_of(command: Command) -> dict[str, list[int]]:
    scripts, reapers = command.processes("script.py"), command.processes("reaper.py")
    workers = [pid for pid in scripts if pid not in reapers and parent_of(pid) == command.pid]
    return {
        "coordinator": command.coordinators(),
        "agent": [command.pid],
        "workers": workers,
        "servers": [pid for pid in command.processes("paceline.server") if pid not in reapers],
        "loaders": [pid for pid in scripts if parent_of(pid) in workers],
    }


def num_steps(folder: Path) -> int:
    with contextlib.suppress(JournalError), RunReader(folder / "runs" / "a") as reader:  # it may be made just now
        return reader.status().num_steps
    return 0


def options_of(case: Case) -> list[str]:
    servers = [] if case.mode == "all-reduce" else ["--servers", "2"]
    return ["run", "-n", "2", "--name", "a", *servers, "--shares", "equal"]


def send_to_all(command: Command, case: Case) -> None:
    found = processes_of(command)
    for kind in case.order:
        for pid in found[kind]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, case.number)
        time.sleep(case.gap_s)


def check_interrupted(folder: Path) -> int:
    """What a run leaves that was interrupted; the epoch it was in."""
    run = folder / "runs" / "a"
    with RunReader(run) as reader:
        assert reader.status().status == "interrupted", (reader.status(), reader.events())
        assert not [event for event in reader.events() if event.kind in ("failed", "lost", "rollback")]
        steps = reader.steps()
    newest = find(run / "checkpoints")
    assert newest, "no checkpoint"
    return steps[-1].epoch


def check_resumed(folder: Path, num_epochs: int) -> None:
    with RunReader(folder / "runs" / "a") as reader:
        assert reader.status().status == "ended"
        assert {step.times_done for step in reader.steps()} == {1}, "steps were done again"
        assert not [event for event in reader.events() if event.kind in ("failed", "lost")]
    assert json.loads((folder / "counts").read_text()) == [float(num_epochs)] * LENGTH


def run_case(folder: Path, case: Case) -> None:
    script = write_script(folder, TRAINING)
    mode = [*MODES[case.mode], str(case.loaders)]
    with paceline(folder, *options_of(case), script, str(ENDLESS), *mode) as command:
        eventually(lambda: num_steps(folder) >= case.steps, f"the run to start; {command.err}")
        send_to_all(command, case)
        code = command.wait()
        assert code == 128 + case.number, command.err
        assert "was interrupted\ngo on after step" in command.err
        assert "  paceline run --resume " in command.err
        assert "Traceback" not in command.err, command.err
    num_epochs = check_interrupted(folder) + 2
    code, _, err = completed(folder, *options_of(case), "--resume", script, str(num_epochs), *mode)
    assert code == 0, err
    check_resumed(folder, num_epochs)


@pytest.mark.parametrize("case", cases(6, 3), ids=str)
def test_a_signal_to_all_processes_at_once(tmp_path: Path, case: Case) -> None:
    run_case(tmp_path, case)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", cases(2, 120), ids=str)
def test_a_signal_to_all_processes_at_once_in_every_order(tmp_path: Path, case: Case) -> None:
    run_case(tmp_path, case)


@pytest.mark.parametrize(("number", "mode"), [(signal.SIGTERM, "servers"), (signal.SIGINT, "all-reduce")])
def test_a_signal_to_all_processes_while_they_start(tmp_path: Path, number: signal.Signals, mode: str) -> None:
    script = write_script(tmp_path, TRAINING)
    case = Case(number, KINDS, mode, 1, 0.0, 0)
    with paceline(tmp_path, *options_of(case), script, str(ENDLESS), *MODES[mode], "1") as command:
        eventually(lambda: bool(command.coordinators() and processes_of(command)["workers"]), "the processes")
        send_to_all(command, case)
        assert command.wait() == 128 + number, command.err
        assert "was interrupted" in command.err


def heed_ctrl_c() -> None:
    """Whoever runs the tests in the background of a shell has SIGINT ignored, and so has every process after it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(("number", "times"), [(signal.SIGTERM, 2), (signal.SIGINT, 1)])
def test_a_signal_to_the_group_of_a_script_alone(tmp_path: Path, number: signal.Signals, times: int) -> None:
    """Its loader workers are in the group. `timeout` sends the signal to its child, and then to the group."""
    script = write_script(tmp_path, TRAINING)

    def start(num_epochs: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, script, str(num_epochs), "allreduce", "sync", "2"],
            cwd=tmp_path,
            env={**os.environ, "ALONE": str(tmp_path / "kept")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=heed_ctrl_c,
        )

    with start(ENDLESS) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "step 5\n":
            assert process.poll() is None
        for _ in range(times):
            os.killpg(process.pid, number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert "Traceback" not in err
    num_done = int(out.split()[-1])
    (newest, *_) = find(tmp_path / "kept")
    assert newest.operation >= num_done
    num_epochs = num_done // (LENGTH // 8) + 2
    with start(num_epochs) as process:
        out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert out.startswith(f"step {num_done + 1}\n")
    assert json.loads((tmp_path / "counts").read_text()) == [float(num_epochs)] * LENGTH
