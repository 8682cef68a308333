"""A selection of PyTorch's own suite; the whole is run by `make torch-suite`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.c10d import torch_exclusions


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world_size", [2, 4])
def test_passes_a_selection_of_torchs_own_suite(world_size: int, tmp_path: Path) -> None:
    pytest.importorskip("expecttest", reason="PyTorch's suite needs it; it is installed by make")
    results = tmp_path / "results.json"
    command = [
        sys.executable,
        "-m",
        "tests.c10d.torch_suite",
        "--quick",
        "--world-size",
        str(world_size),
        "--json",
        str(results),
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment)
    assert done.returncode == 0, done.stderr[-20_000:]
    outcomes = json.loads(results.read_text())["outcomes"]
    assert set(outcomes) == torch_exclusions.QUICK[world_size]
    assert set(outcomes.values()) == {"passed"}
