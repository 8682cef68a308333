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
import pytest
import safetensors.torch
import torch

import paceline
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


def test_muon_learns_alone() -> None:
    assert float(run_alone("muon.py", "--epochs", "3").split()[-1]) > 0.8


def test_lora_learns_alone_and_keeps_its_adapter(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="PEFT is not installed: pip install '.[tools]'")
    assert float(run_anew("lora.py", "--folder", str(tmp_path)).split()[-1]) > 0.7
    names = safetensors.torch.load_file(tmp_path / "latest" / "model.safetensors").keys()
    assert all("lora_" in name or "modules_to_save" in name for name in names)


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


def test_elastic_loses_a_worker_gains_one_and_no_sample_twice(tmp_path: Path) -> None:
    picture = tmp_path / "run.svg"
    output = run_anew("elastic.py", "--short", "--picture", str(picture))
    assert ">>> kill -9" in output
    *_, accuracy, samples, outage = output.strip().splitlines()
    assert float(accuracy.split()[2]) > 0.9
    assert samples == "Samples: epochs 0 to 15: 1,500 samples in each epoch, each once."
    assert outage.startswith("From the kill to the next step of the survivors: ")
    assert all(words in picture.read_text() for words in ("kill -9", "a worker joins", "worker 3", "polyline"))


def run_with_servers(folder: Path, name: str, *arguments: str) -> str:
    """On two workers and two servers, as `hybrid`; what the workers printed."""
    options = ["-n", "2", "--servers", "2", "--replicas", "2", "--plain", "--folder", str(folder)]
    command = [sys.executable, "-m", "paceline", "run", *options, str(EXAMPLES / name), "--strategy", "hybrid"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def last_numbers(output: str) -> list[float]:
    """The last number of each epoch's line."""
    return [float(line.split()[-1]) for line in output.splitlines() if re.search(r"epoch \d+: ", line)]


RATINGS = ("--epochs", "8", "--batch", "256")


def test_ratings_learns_alone() -> None:
    errors = last_numbers(run_alone("ratings.py", *RATINGS))
    assert len(errors) == 8
    assert errors[-1] < 0.75 < 0.9 < errors[0]


@pytest.mark.soak
def test_ratings_comes_to_the_same_with_servers(tmp_path: Path) -> None:
    alone = last_numbers(run_alone("ratings.py", *RATINGS))
    served = last_numbers(run_with_servers(tmp_path, "ratings.py", *RATINGS))
    assert all(abs(one - other) < 0.002 for one, other in zip(alone, served, strict=True))


def test_ratings_reads_movielens_and_recbole_alike() -> None:
    read = runpy.run_path(str(EXAMPLES / "ratings.py"))["read"]
    rows = [(user * 31, f"film {item}", 1 + (user + item) % 5) for user in range(5) for item in range(5)]
    plain = [f"{user}\t{item}\t{rating}\t881250949\n" for user, item, rating in rows]
    header = "item_id:token\ttimestamp:float\tuser_id:token\trating:float\r\n"
    typed = [header, *(f"{item}\t1\t{user}\t{float(rating)}\r\n" for user, item, rating in rows), "\n"]
    for one, other in zip(read(plain), read(typed), strict=True):
        assert one.tolist() == other.tolist()
    users, items, ratings = read(plain)
    assert users.tolist() == [user for user, _, _ in rows], "numbers are their own ids"
    assert len(set(items.tolist())) == 5
    assert ratings.tolist() == [rating for _, _, rating in rows]
    for lines, problem in ((["1\t2\n"], "line 1 has no user, item and rating"), ([], "no ratings")):
        with pytest.raises(SystemExit, match=problem):
            read(lines)


def test_clicks_learns_alone_and_the_same_with_servers(tmp_path: Path) -> None:
    alone = last_numbers(run_alone("clicks.py"))
    assert len(alone) < 10, "it stops early"
    assert max(alone) > 0.75
    served = last_numbers(run_with_servers(tmp_path, "clicks.py", "--epochs", "2"))
    assert len(served) == 2
    assert all(abs(one - other) < 0.01 for one, other in zip(alone, served, strict=False))


def test_clicks_has_a_table_for_all_categories_or_one_for_each() -> None:
    example = runpy.run_path(str(EXAMPLES / "clicks.py"))
    counts, categories, _ = example["read"](example["made_up"](5))
    for is_shared, num_tables in ((True, 2), (False, 27)):
        model = example["WideAndDeep"](4, is_shared=is_shared)
        assert len(dict(paceline.nn.tables_in(model))) == num_tables
        assert model(counts, categories).shape == (5,)


def test_clicks_reads_tabs_commas_a_header_and_gaps() -> None:
    read = runpy.run_path(str(EXAMPLES / "clicks.py"))["read"]
    header = ["label", *(f"I{number}" for number in range(1, 14)), *(f"C{number}" for number in range(1, 27))]
    row = ["1", "", "-1", "260.0", *["7"] * 10, "05db9164", *["68fd1e64"] * 24, ""]
    counts, categories, labels = read(["\t".join(row) + "\n"])
    assert labels.tolist() == [1.0]
    assert counts[0, :4].tolist() == pytest.approx([0.0, -0.6931, 5.5645, 2.0794], abs=1e-3)
    assert counts[0, 13:].tolist() == [1.0] + [0.0] * 12, "which are missing"
    assert len(set(categories[0].tolist())) == 26, "a value has another id in another category"
    for one, other in zip(read([",".join(header), ",".join(row)]), (counts, categories, labels), strict=True):
        assert one.tolist() == other.tolist()
    with pytest.raises(SystemExit, match="line 1 has 39 fields"):
        read(["\t".join(row[1:])])


def test_clicks_ranks_by_area_under_the_curve() -> None:
    area = runpy.run_path(str(EXAMPLES / "clicks.py"))["area_under_curve"]
    labels = torch.tensor([0.0, 0.0, 1.0, 1.0])
    assert area(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels) == 1.0
    assert area(torch.tensor([0.4, 0.3, 0.2, 0.1]), labels) == 0.0
    assert area(torch.zeros(4), labels) == 0.5
    assert area(torch.tensor([0.1, 0.3, 0.2, 0.4]), labels) == 0.75


def test_every_example_is_tested_here() -> None:
    tested = [
        "chargpt.py",
        "clicks.py",
        "collectives.py",
        "digits.py",
        "elastic.py",
        "elastic_picture.py",
        "fashion.py",
        "lora.py",
        "muon.py",
        "ratings.py",
    ]
    assert [path.name for path in sorted(EXAMPLES.glob("*.py"))] == tested
