"""Every example runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_collectives_shows_sums_a_death_a_new_group_and_the_speed() -> None:
    command = [sys.executable, str(EXAMPLES / "collectives.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the mean of 0, 1, 2, 3 is 1.5" in done.stdout
    assert done.stdout.count(", rank 2\n") == 3
    assert "a new group of 3 works in the same processes" in done.stdout
    assert "paceline auto, arena : gloo" in done.stdout


def test_every_example_is_tested_here() -> None:
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == ["collectives.py"]
