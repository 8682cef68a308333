"""`paceline bench allreduce`: its pure parts, its complaints, small real runs that leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from paceline.cli.bench.allreduce import libraries, measure, report, worker
from paceline.cli.bench.allreduce.drivers.base import AllReduceDriver, Buffer
from paceline.cli.bench.allreduce.measure import AllReduceResults, Measurement
from paceline.cli.bench.allreduce.messages import MeasureOrder, RankTimes
from paceline.cli.bench.allreduce.plan import (
    AllReducePlan,
    Contender,
    contenders_of,
    format_size,
    num_iterations,
    parse_names,
    parse_size,
    parse_sizes,
)
from paceline.cli.bench.errors import BadInput, BenchError
from paceline.cli.main import app

GLOO = Contender("gloo")
OURS = Contender("paceline", "direct", "arena")


def make_plan(**changes: Any) -> AllReducePlan:
    settings: dict[str, Any] = {
        "num_ranks": 2,
        "num_rounds": 2,
        "num_threads": 1,
        "sizes": (1024, 2**20),
        "contenders": (OURS, GLOO),
    }
    return AllReducePlan(**{**settings, **changes})


LIBRARIES = {library.name: library for library in (libraries.OURS, libraries.TORCH_GLOO)}


@pytest.fixture
def leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Afterwards no worker lives and no temporary file is left."""
    # Short, for the Unix socket in it.
    with tempfile.TemporaryDirectory(prefix="pb") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield
        assert os.listdir(folder) == []
        assert workers_in(folder) == []


def workers_in(folder: str) -> list[int]:
    """The processes whose temporary files go below this folder."""
    living = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"TMPDIR={folder}/".encode() in (entry / "environ").read_bytes():
                living.append(int(entry.name))
        except OSError:
            continue
    return living


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("512B", 512), ("1KB", 1024), ("64kb", 65536), (" 1 MB ", 2**20), ("2GB", 2**31)]
)
def test_size_is_read(text: str, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize("text", ["5XB", "1", "KB", "-1KB", "1.5MB", "0KB", "3B", "", "1KB2", "²KB"])
def test_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--sizes"):
        parse_size(text)


def test_sizes_keep_their_order_without_repeats() -> None:
    assert parse_sizes("1MB,1KB,,1024B") == (2**20, 1024)
    assert [format_size(size) for size in (4, 1024, 1028, 100 * 2**20)] == ["4 B", "1 KB", "1028 B", "100 MB"]


def test_names_are_checked() -> None:
    assert parse_names("--x", "b,a,b", ("a", "b")) == ("b", "a")
    assert parse_names("--x", "none", ("a",)) == ()
    with pytest.raises(BadInput, match="'c' is unknown; choose from a, b"):
        parse_names("--x", "a,c", ("a", "b"))


def test_small_operations_are_repeated_more() -> None:
    counts = [num_iterations(parse_size(size)) for size in ("1KB", "64KB", "1MB", "16MB", "100MB", "1GB")]
    assert counts == [300, 200, 100, 21, 7, 7]


def test_contenders_are_all_pairs_and_the_peers() -> None:
    made = contenders_of(["auto", "ring"], ["arena", "ordinary"], ["gloo"])
    labels = [contender.label for contender in made]
    assert labels == [
        "paceline auto, arena",
        "paceline auto, ordinary",
        "paceline ring, arena",
        "paceline ring, ordinary",
        "gloo",
    ]


def test_order_rotates_and_covers_everything_once() -> None:
    trio = (Contender("a"), Contender("b"), Contender("c"))
    steps = list(measure.measurement_order(make_plan(num_rounds=4, contenders=trio)))
    assert len(set(steps)) == len(steps) == 4 * 2 * 3
    firsts = [step.contender.library for step in steps if step.num_bytes == 1024][::3]
    assert firsts == ["a", "b", "c", "a"]
    assert [step.num_bytes for step in steps[:6]] == [1024] * 3 + [2**20] * 3
    assert [step.round_index for step in steps] == sorted(step.round_index for step in steps)


def test_time_runs_from_the_last_in_to_the_last_out() -> None:
    early = RankTimes(entered_ns=[100, 1000], left_ns=[190, 1500])
    late = RankTimes(entered_ns=[150, 900], left_ns=[180, 1400])
    assert measure.last_in_to_last_out_ns([early, late]) == [40, 500]


def test_ranks_that_measured_unequally_often_are_refused() -> None:
    with pytest.raises(ValueError):
        measure.last_in_to_last_out_ns([RankTimes([1, 2], [3, 4]), RankTimes([1], [2])])


@pytest.mark.parametrize("num_ranks", [2, 4, 64])
def test_buffer_knows_its_exact_sum(num_ranks: int) -> None:
    total = np.zeros(300_000, dtype=np.float32)
    for rank in range(num_ranks):
        array = np.empty_like(total)
        Buffer(array, array).fill(rank)
        total += array
    assert Buffer(total, total).holds_sum(num_ranks)
    total[299_999] += 1
    assert not Buffer(total, total).holds_sum(num_ranks)


class Forgetful(AllReduceDriver[None]):
    """Two ranks in one process; from a given operation on, the other rank's numbers are forgotten."""

    rank, num_ranks, version = 0, 2, "none"

    def __init__(self, forgets_from: int) -> None:
        self.num_operations = 0
        self._forgets_from = forgets_from

    def barrier(self) -> None:
        pass

    def buffer(self, num_elements: int, tensors: str) -> Buffer[None]:
        return Buffer(None, np.zeros(num_elements, dtype=np.float32))

    def all_reduce(self, buffer: Buffer[None], algorithm: str) -> None:
        self.num_operations += 1
        if buffer.array.any() and self.num_operations < self._forgets_from:
            other = self.buffer(len(buffer.array), "ordinary")
            other.fill(1)
            buffer.array += other.array

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("forgets_from", "when"), [(1, "before"), (2, "after")])
def test_wrong_sum_is_found_before_and_after_timing(forgets_from: int, when: str) -> None:
    order = MeasureOrder(1000, num_warmups=2, num_iterations=5, algorithm="ring", tensors="ordinary")
    right = Forgetful(forgets_from=100)
    assert len(worker._measure(right, right.buffer(1000, "ordinary"), order).left_ns) == 5
    assert right.num_operations == 1 + 2 + 5 + 1
    wrong = Forgetful(forgets_from)
    with pytest.raises(ArithmeticError, match=f"wrong sum of 1000 float32 {when} the timed operations"):
        worker._measure(wrong, wrong.buffer(1000, "ordinary"), order)


def make_results() -> AllReduceResults:
    rounds_ms = {
        (OURS, 1024): [0.01, 0.03],
        (OURS, 2**20): [1.0, 1.0],
        (GLOO, 1024): [0.1, 0.1],
        (GLOO, 2**20): [0.5, 0.5],
    }
    return AllReduceResults(rounds_ms, {"paceline": "1", "gloo": "torch 2"})


def test_ratio_says_how_many_times_faster() -> None:
    made = report.ratios(make_plan(), make_results())
    assert [(ratio.num_bytes, ratio.peer) for ratio in made] == [(1024, GLOO), (2**20, GLOO)]
    assert [ratio.times_faster for ratio in made] == pytest.approx([5.0, 0.5])


def test_record_is_complete_json() -> None:
    content = report.record(make_plan(), make_results())
    read = json.loads(json.dumps(content))
    assert set(read) == {"versions", "settings", "results", "ratios"}
    assert len(read["results"]) == 4
    first = read["results"][0]
    assert (first["rounds_ms"], first["median_ms"]) == ([0.01, 0.03], 0.02)
    assert (first["lowest_ms"], first["highest_ms"], first["iterations"]) == (0.01, 0.03, 300)


def test_tables_have_a_row_a_contender_and_a_row_a_pair() -> None:
    times, comparison = report.tables(make_plan(), make_results())
    assert (times.row_count, comparison.row_count) == (2, 1)
    only_peers = make_plan(contenders=(GLOO,))
    assert len(report.tables(only_peers, make_results())) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--sizes", "5XB"], "'5XB' is not a size"),
        (["--sizes", ","], "--sizes is empty"),
        (["--ranks", "0"], "--ranks 0"),
        (["--ranks", "1"], "--ranks 1"),
        (["--rounds", "0"], "--rounds 0"),
        (["--threads", "0"], "--threads 0"),
        (["--algorithms", "magic"], "'magic' is unknown"),
        (["--tensors", "nowhere"], "'nowhere' is unknown"),
        (["--algorithms", "none", "--no-gloo"], "nothing to measure"),
        (["--json", "/nonexistent/folder/out.json"], "there is no folder"),
        (["--json", "/"], "this is a folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run", lambda *args, **kwargs: pytest.fail("measured in spite of it"))
    done = CliRunner().invoke(app, ["bench", "allreduce", *options])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_settings_of_a_library_do_not_leak(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("I_MPI_ADJUST_ALLREDUCE", "2")
    other = libraries.BenchLibrary(name="other", driver="none:None", left_out=("I_MPI_",))
    assert "I_MPI_ADJUST_ALLREDUCE" not in libraries.environment_of(other, num_threads=1, folder=tmp_path)
    environment = libraries.environment_of(libraries.TORCH_GLOO, num_threads=3, folder=tmp_path)
    assert environment["GLOO_SOCKET_IFNAME"] == "lo"
    assert environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.timeout(60)
def test_command_writes_what_it_measured(tmp_path: Path, leaves_nothing: None) -> None:
    path = tmp_path / "out.json"
    options = ["--algorithms", "none", "--sizes", "1KB", "--rounds", "3"]
    done = CliRunner().invoke(app, ["bench", "allreduce", *options, "--json", str(path)])
    assert done.exit_code == 0, done.stderr
    assert "gloo" in done.stdout
    read = json.loads(path.read_text())
    assert [len(result["rounds_ms"]) for result in read["results"]] == [3]
    assert read["versions"]["gloo"].startswith("torch")
    assert {"cpu", "cores", "torch", "date"} <= set(read["machine"])


@pytest.mark.timeout(60)
def test_paceline_is_measured_against_gloo(leaves_nothing: None) -> None:
    ours = contenders_of(["auto", "direct", "ring"], ["arena", "ordinary"], ["gloo"])
    plan = make_plan(contenders=ours, sizes=(1024, 65536))
    results = measure.run(plan, [LIBRARIES["paceline"], LIBRARIES["gloo"]])
    assert all(len(rounds) == 2 and min(rounds) > 0 for rounds in results.rounds_ms.values())
    assert len(report.ratios(plan, results)) == 6 * 2


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["paceline", "gloo"])
def test_worker_killed_in_the_middle_ends_everything(name: str, leaves_nothing: None) -> None:
    # Beside ours there is another crew, which has to end too.
    contenders = (OURS, GLOO) if name == "paceline" else (Contender(name),)
    plan = make_plan(contenders=contenders, num_rounds=1000, sizes=(1024,))
    taking_part = [LIBRARIES[library] for library in plan.libraries]

    def kill_one(step: Measurement) -> None:
        if step.round_index == 2:
            os.kill(_a_worker(name), signal.SIGKILL)

    with pytest.raises(BenchError) as caught:
        measure.run(plan, taking_part, on_step=kill_one)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert "was ended by SIGKILL" in message


@pytest.mark.timeout(60)
def test_interrupt_leaves_nothing(leaves_nothing: None) -> None:
    def interrupt(step: Measurement) -> None:
        if step.round_index == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure.run(make_plan(contenders=(GLOO,)), [LIBRARIES["gloo"]], on_step=interrupt)


@pytest.mark.timeout(60)
def test_worker_that_cannot_start_shows_its_last_lines(leaves_nothing: None, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(libraries.TORCH_GLOO, environment={"GLOO_SOCKET_IFNAME": "no-such-interface"})
    with pytest.raises(BenchError, match="no-such-interface"):
        measure.run(make_plan(contenders=(GLOO,)), [broken])


def _a_worker(library: str) -> int:
    """A rank of this library, below the temporary folder of this test."""
    for pid in workers_in(str(tempfile.tempdir)):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        if words[1:3] == ["-m", "paceline.cli.bench.allreduce.worker"] and LIBRARIES[library].driver in words:
            return pid
    raise AssertionError(f"no worker of {library} is running")
