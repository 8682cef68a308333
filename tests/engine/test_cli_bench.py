"""`paceline bench SCRIPT` with real workers: what each did in a step, and clean errors where there is nothing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from tests.engine.commands import completed, write_script

TRAINING = """
import sys
import torch
import paceline

torch.manual_seed(0)
x = torch.randn(2000, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.AdamW(model.parameters())
strategy, consistency = sys.argv[1:]
session = paceline.Session(
    model, optimizer, data=data, global_batch=20, strategy=strategy, consistency=consistency,
    checkpoints=paceline.Checkpoints(folder="precious", every_steps=1, resume=True),
)
for epoch in session.epochs(1000):
    for batch in epoch:
        session.step(lambda x, y: ((model(x) - y) ** 2).mean(), batch)
"""


@pytest.mark.parametrize(
    ("strategy", "consistency", "servers", "kinds"),
    [
        ("allreduce", "sync", "0", {"data", "forward", "backward", "copy", "reduce", "header", "optimizer"}),
        ("server", "sync", "1", {"data", "forward", "backward", "copy", "header", "servers"}),
        ("server", "async", "1", {"data", "forward", "backward", "copy", "leases", "servers"}),
    ],
)
def test_a_step_of_two_workers(tmp_path: Path, strategy: str, consistency: str, servers: str, kinds: set[str]) -> None:
    script = write_script(tmp_path, TRAINING)
    options = ("--skip", "3", "--steps", "15", "--svg", "step.svg", "--json", "step.json")
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    code, out, err = completed(
        tmp_path, "bench", "-n", "2", "--servers", servers, *options, script, strategy, consistency, TMPDIR=str(scratch)
    )
    assert code == 0, err
    assert "worker 1" in out
    assert "one step of all workers" in out
    assert (tmp_path / "step.svg").read_text().startswith("<svg")
    found = json.loads((tmp_path / "step.json").read_text())
    assert [one["worker"] for one in found["workers"]] == [0, 1]
    for one in found["workers"]:
        assert kinds <= set(one["parts_s"]) <= kinds | {"session", "script", "waiting"}
        assert sum(one["parts_s"].values()) == pytest.approx(one["step_s"])
    assert found["facts"]["strategy"] == strategy
    # Nothing is left of the run, and the script's own checkpoints are not touched.
    assert not (tmp_path / "precious").exists()
    assert list(scratch.iterdir()) == []


def test_a_script_that_has_no_steps(tmp_path: Path) -> None:
    code, _, err = completed(tmp_path, "bench", "-n", "2", write_script(tmp_path, "print('hello')"))
    assert code == 1
    assert "script.py made no paceline.Session" in err
    code, _, err = completed(tmp_path, "bench", write_script(tmp_path, "raise ValueError('no such thing')"))
    assert code == 1
    assert "script.py failed, so there is nothing to show" in err
    assert "ValueError: no such thing" in err


def test_a_script_that_ends_too_early(tmp_path: Path) -> None:
    script = write_script(tmp_path, TRAINING.replace("epochs(1000)", "epochs(1)").replace("2000", "200"))
    code, _, err = completed(tmp_path, "bench", "--skip", "8", script, "allreduce", "sync")
    assert code == 1
    assert "whole steps were recorded, at least 5 are needed" in err
    assert tempfile.gettempdir() not in err
