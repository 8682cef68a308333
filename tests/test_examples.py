"""Every example runs as its first lines say."""

from __future__ import annotations

import gzip
import os
import re
import runpy
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from paceline.testing.forking import fork_context

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_anew(name: str, *arguments: str) -> str:
    """As a person starts it."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_alone(name: str, *arguments: str) -> str:
    """The same in a process that has imported torch already; `test_elastic` starts the same kind of script anew."""
    with tempfile.NamedTemporaryFile("r") as output:
        process = fork_context().Process(target=_main, args=(name, arguments, output.name))
        process.start()
        process.join(110.0)
        code = process.exitcode
        process.kill()
        process.join()
        process.close()
        said = output.read()
    assert code == 0, said
    return said


def _main(name: str, arguments: tuple[str, ...], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.argv = [str(EXAMPLES / name), *arguments]
    runpy.run_path(sys.argv[0], run_name="__main__")


def test_collectives_shows_sums_a_death_a_new_group_and_the_speed() -> None:
    output = run_alone("collectives.py", "--rounds", "1", "--sizes", "1KB,1MB")
    assert "the mean of 0, 1, 2, 3 is 1.5" in output
    # Not by lines: without buffers a line and its end are two writes, and three processes write at once.
    assert len(re.findall(r"rank \d knows after [\d.]+ ms: member \S+ rank 2", output)) == 3
    assert "a new group of 3 works in the same processes" in output
    assert "paceline auto, arena : gloo" in output


def test_digits_learns_alone() -> None:
    output = run_alone("digits.py", "--epochs", "4")
    last = output.strip().splitlines()[-1]
    assert last.startswith("epoch 3: ")
    assert float(last.split()[-1]) > 0.85


def test_fashion_reads_its_files_and_learns_alone(tmp_path: Path) -> None:
    for split, count in (("train", 600), ("t10k", 101)):
        labels = np.arange(count, dtype=np.uint8) % 10
        images = np.zeros((count, 28, 28), np.uint8)
        images[np.arange(count), labels * 2] = 255  # a line at a height that tells the class
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", labels)
        write_idx(tmp_path / f"{split}-images-idx3-ubyte.gz", images)
    output = run_alone("fashion.py", str(tmp_path), "--epochs", "4", "--batch", "32")
    assert output.strip().splitlines()[-1] == "epoch 3: 101 of 101 right"


def write_idx(path: Path, array: npt.NDArray[np.uint8]) -> None:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    content = header + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def test_chargpt_learns_a_text_alone(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 300)
    output = run_alone("chargpt.py", str(path), "--epochs", "6", "--batch", "16", "--context", "32", "--width", "32")
    losses = [float(line.split()[-1]) for line in output.splitlines() if "validation loss" in line]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]


def test_elastic_loses_a_worker_gains_one_and_no_sample_twice() -> None:
    output = run_anew("elastic.py", "--short")
    assert ">>> kill -9" in output
    *_, accuracy, samples, outage = output.strip().splitlines()
    assert float(accuracy.split()[2]) > 0.9
    assert samples == "Samples: epochs 0 to 15: 1,500 samples in each epoch, each once."
    assert outage.startswith("From the kill to the next step of the survivors: ")


def test_every_example_is_tested_here() -> None:
    tested = ["chargpt.py", "collectives.py", "digits.py", "elastic.py", "fashion.py"]
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == tested
