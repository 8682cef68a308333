"""benchmarks/: that none is left out of `make bench-quick`, what they share, and the pure parts of some."""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

import paceline
from benchmarks import __main__ as runner
from benchmarks import catalogue
from benchmarks.allreduce import benchmark as allreduce
from benchmarks.allreduce import peers
from benchmarks.catalogue import RUNS, Run
from benchmarks.common import SKIPPED, Benchmark, Found, Option, Skipped, Target, figures, targets
from benchmarks.server.drivers import base
from benchmarks.server.plan import Plan as ServerPlan
from benchmarks.shares import benchmark as shares
from benchmarks.shares import measure as shares_measure
from benchmarks.shares.measure import Results as SharesResults
from benchmarks.shares.plan import AT_ONCE, AUTO, CNN, DDP, EQUAL
from benchmarks.shares.plan import Plan as SharesPlan
from benchmarks.shares.trainers import NUM_WARM, Trained
from paceline.cli.bench.allreduce import libraries

pytestmark = pytest.mark.timeout(60)

FOLDER = Path(catalogue.__file__).parent
MODULES = sorted({run.module for run in RUNS})
SOURCE = Path(paceline.__file__).parent


# -- the list ----------------------------------------------------------------------------------------------------------


def test_every_benchmark_is_run_by_bench_quick() -> None:
    """What says BENCHMARK is one, in a file of its own or in a folder."""
    found = set()
    for path in FOLDER.rglob("*.py"):
        if "BENCHMARK = Benchmark(" in path.read_text() and "common" not in path.relative_to(FOLDER).parts:
            found.add(path.stem if path.parent == FOLDER else path.parent.name)
    assert found == {run.module for run in RUNS if run.quick_too}
    assert found == set(MODULES)


def test_make_runs_the_list() -> None:
    makefile = (FOLDER.parent / "Makefile").read_text()
    assert "$(BIN)/python -m benchmarks --quick\n" in makefile
    assert "$(BIN)/python -m benchmarks\n" in makefile


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_has_a_quick_form_that_keeps_nothing(module: str) -> None:
    benchmark = catalogue.load(module)
    for run in RUNS:
        if run.module != module:
            continue
        quick, full = benchmark.parse([*run.arguments, "--quick"]), benchmark.parse(run.arguments)
        assert quick.json is None
        assert full.json.parent == FOLDER / "results"
        # The way it is called must not undo what makes it quick.
        given = {option.name for option in benchmark.options if option.flag in run.arguments}
        changed = [option for option in benchmark.options if option.quick != option.default]
        assert any(option.name not in given for option in changed)


def test_results_of_different_runs_go_to_different_files() -> None:
    files = [catalogue.load(run.module).parse(run.arguments).json for run in RUNS]
    assert len(set(files)) == len(files)


@pytest.fixture(scope="module")
def sources() -> dict[Path, list[ast.AST]]:
    return {path: list(ast.walk(ast.parse(path.read_text()))) for path in SOURCE.rglob("*.py")}


def test_the_package_needs_none_of_the_peers(sources: dict[Path, list[ast.AST]]) -> None:
    foreign = {"matplotlib", "mpi4py", "ray", "redis"}
    for path, nodes in sources.items():
        for node in nodes:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not foreign & {name.split(".")[0] for name in names}, path


def test_classes_of_the_bench_commands_have_names_of_their_own(sources: dict[Path, list[ast.AST]]) -> None:
    owners: dict[str, set[Path]] = {}
    for path, nodes in sources.items():
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                owners.setdefault(node.name, set()).add(path)
    bench = SOURCE / "cli" / "bench"
    shared = {name for name, paths in owners.items() if len(paths) > 1 and any(bench in path.parents for path in paths)}
    assert not shared


# -- running them ------------------------------------------------------------------------------------------------------


def test_one_that_fails_does_not_hide_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    codes = {"steps": 3, "ddp": SKIPPED, "index": 0}
    monkeypatch.setattr(runner, "RUNS", tuple(map(Run, codes)))
    monkeypatch.setattr(runner, "run_one", lambda run, quick: (codes[run.module], 1.0))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--quick"])
    with pytest.raises(SystemExit) as left:
        runner.main()
    assert left.value.code
    printed = capfd.readouterr().out
    assert "FAILED: exit code 3" in printed
    assert "skipped" in printed
    assert "done" in printed
    codes["steps"] = 0
    with pytest.raises(SystemExit) as left:
        runner.main()
    assert not left.value.code


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner, "QUICK_S", 0.5)
    code, _ = runner.run_one(Run("stuck"), quick=True)
    assert code == -1


def test_smallest_benchmark_runs_as_a_command(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.json"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--quick", "--sizes", "5", "--json", str(path)]
    done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert "times of a copy: at most 2 (a plain copy of as many bytes); found" in done.stdout
    read = json.loads(path.read_text())
    assert {"cpu", "cores", "torch", "date"} <= set(read["machine"])
    assert read["command"].startswith("python -m benchmarks.checkpoint --quick")
    assert [one["met"] in (True, False) for one in read["targets"]] == [True]


# -- what they share ---------------------------------------------------------------------------------------------------


def toy(measure: Found | Exception) -> Benchmark:
    def run(options: argparse.Namespace) -> Found:
        if isinstance(measure, Exception):
            raise measure
        return measure

    goal = Target("speed", "a snail", lambda record: record.get("speed"), at_least=2.0)
    options = [
        Option("--rounds", 9, quick=1),
        Option("--names", ["a"], quick=["b", "c"]),
        Option("--draw", True, quick=False),
    ]
    return Benchmark("a toy", "toy", run, targets=[goal], options=options)


def test_quick_values_are_taken_unless_others_are_given() -> None:
    benchmark = toy(Found({}, []))
    full, quick, given = (benchmark.parse(words) for words in ([], ["--quick"], ["--quick", "--rounds", "5", "--draw"]))
    assert (full.rounds, full.names, full.draw) == (9, ["a"], True)
    assert (quick.rounds, quick.names, quick.draw) == (1, ["b", "c"], False)
    assert (given.rounds, given.draw) == (5, True)


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({"speed": 2.5}, "target met: speed: at least 2 (a snail); found 2.5"),
        ({"speed": 1.5}, "target missed: speed: at least 2 (a snail); found 1.5"),
        ({}, "target not measured: speed: at least 2 (a snail)"),
    ],
)
def test_a_benchmark_ends_with_its_targets(
    record: dict[str, float],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["toy", "--json", str(tmp_path / "toy.json")])
    monkeypatch.setattr("benchmarks.common.benchmark.signal.signal", lambda *_: None)
    toy(Found(dict(record), [Table("a column")])).main()
    assert capsys.readouterr().out.splitlines()[-1] == line
    assert json.loads((tmp_path / "toy.json").read_text())["benchmark"] == "toy"


def test_one_that_lacks_something_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["toy", "--quick"])
    monkeypatch.setattr("benchmarks.common.benchmark.signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        toy(Skipped("no snail (pip install snail)")).main()
    assert left.value.code == SKIPPED
    assert "toy is skipped: no snail (pip install snail)" in capsys.readouterr().out


def test_who_has_no_target_says_so() -> None:
    assert targets.verdicts([], quick=False) == ["no target"]
    with pytest.raises(ValueError, match="at_least or at_most"):
        Target("speed", "a snail", lambda record: 1.0)


def test_contenders_take_turns_and_another_begins_each_round() -> None:
    order: list[str] = []
    found = figures.interleave({name: lambda: 1 for name in "abc"}, 4, lambda number, name: order.append(name))
    assert "".join(order) == "abcbcacababc"
    assert found == {name: [1] * 4 for name in "abc"}


def test_ratios_are_taken_within_rounds() -> None:
    assert figures.ratio([2.0, 30.0, 6.0], [1.0, 10.0, 2.0]) == 3.0
    assert figures.spread([3.0, 1.0, 2.0], ".0f") == "2 (1-3)"
    assert figures.with_worst([0.001, 0.004, 0.002], ".0f", 1e3) == "2 (4)"


def test_a_peer_that_is_not_installed_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = peers.Missing("impi", "pip install impi-rt")
    monkeypatch.setattr(peers, "find", lambda name: missing if name == "impi" else libraries.TORCH_GLOO)
    assert allreduce.find_peers(["gloo", "impi"]) == [libraries.TORCH_GLOO]
    assert capsys.readouterr().out == "impi is left out, it is not installed; to compare: pip install impi-rt\n"


# -- pure parts of some ------------------------------------------------------------------------------------------------


def test_ids_follow_zipfs_law_and_repeat() -> None:
    plan = ServerPlan("sparse", 10_000, 1, 1, 1.0, ("paceline",), batch=5000)
    first, *_ = base.batches(plan, 0)
    known = set(base.id_of(np.arange(plan.size)).tolist())
    assert len(known) == plan.size, "each row has an id of its own"
    assert set(first.tolist()) <= known
    assert 0.1 < len(set(first.tolist())) / len(first) < 0.6, "frequent ones come again and again"
    assert [one.tolist() for one in base.batches(plan, 0)] == [one.tolist() for one in base.batches(plan, 0)]


def test_shares_are_parts_of_the_sum_alone_in_the_same_round() -> None:
    plan = SharesPlan(CNN, (1.0, 0.5), 2, 1.0, 100, 1, (DDP,), samples=64)
    together = {AT_ONCE: [145.0, 140.0], AUTO: [140.0, 150.0], EQUAL: [70.0, 75.0], DDP: [60.0, 60.0]}
    results = SharesResults(
        by_quota=True,
        alone=[[100.0, 50.0], [100.0, 100.0]],
        together=together,
        shares=[[85, 43], [84, 44]],
        late_changes=[0, 1],
        changing=[0.9, 0.8],
        relief=[3, 4],
    )
    record = shares.record_of(plan, results)
    assert json.loads(json.dumps(record))["of_sum_alone"][AUTO] == pytest.approx((140 / 150 + 150 / 200) / 2)
    assert record["auto_of_equal_shares"] == 2.0
    assert len(shares.tables_of(plan, results)) == 2


def test_relief_counts_the_steps_with_the_old_share() -> None:
    courses = [[1.0, 0.5], [0.5, 1.0]]
    slower = [80] * NUM_WARM + [80] * 100 + [80] * 3 + [40] * 97
    faster = [128 - share for share in slower]
    found = [Trained(1.0, 200, shares) for shares in (slower, faster)]
    assert shares_measure._relief(found, courses, 1, 100) == [3]
    assert shares_measure._late_changes([slower, faster]) == 1
