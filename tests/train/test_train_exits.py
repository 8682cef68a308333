"""How a script that runs alone ends: with its own exit code, at once, and with nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys, time, torch, torch.nn.functional as F
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
            print("three", flush=True)
            if ending == "error":
                raise ArithmeticError("enough")
            if ending == "exit":
                sys.exit(3)
"""


def test_every_ending_of_a_script_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # As many threads as torch takes by itself: loader workers are forked from a process that may have several.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    started = {}
    for ending in ("end", "error", "exit", "signal"):
        command = [sys.executable, str(script), ending, str(tmp_path / ending)]
        started[ending] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    try:
        waiting = started["signal"]
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "three\n"
        waiting.send_signal(signal.SIGTERM)
        ended = {
            ending: (process.communicate(timeout=100.0)[1], process.returncode) for ending, process in started.items()
        }
    finally:
        for process in started.values():
            process.kill()
            process.communicate()
    assert {ending: code for ending, (_, code) in ended.items()} == {"end": 0, "error": 1, "exit": 3, "signal": 0}, (
        ended
    )
    assert "ArithmeticError: enough" in ended["error"][0]
    assert all(not text for ending, (text, _) in ended.items() if ending != "error"), ended
    kept = {ending: list((tmp_path / ending).glob("*/")) for ending in ended}
    assert kept["end"], "what came out is saved"
    assert kept["signal"]
    assert not kept["error"], "what a script in error leaves is not taken for its end"
    assert ended["end"][0] == ""  # also loader workers, forked from a process that has a session, end without a word
