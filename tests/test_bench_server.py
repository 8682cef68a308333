"""`paceline bench server`: what it refuses, and that a small run of it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from paceline.cli.bench.server.drivers import base
from paceline.cli.bench.server.plan import Plan
from typer.testing import CliRunner, Result

from paceline.cli.main import app


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", "server", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--work", "both"], "--work both: give dense or sparse"),
        (["--against", "redis"], "--against redis: with --work dense there is paceline, rpc, ray"),
        (["--rounds", "0"], "--rounds 0 must be 1 or more"),
        (["--workers", "0"], "--workers 0: give 1 to 64"),
        (["--size", "5"], "--size 5 must be 1000"),
        (["--json", "/nowhere/figures.json"], "there is no folder /nowhere"),
    ],
)
def test_bad_input_is_refused_before_anything_is_started(arguments: list[str], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize(
    ("work", "against", "measures"),
    [
        pytest.param("dense", "rpc", ["push and pull"], marks=pytest.mark.soak),
        ("sparse", "", ["pull", "push"]),
    ],
)
def test_everything_is_measured(tmp_path: Path, work: str, against: str, measures: list[str]) -> None:
    path = tmp_path / "figures.json"
    small = ("--size", "20000", "--batch", "1000", "--rounds", "1", "--seconds", "0.2")
    result = bench("--work", work, "--against", against, *small, "--json", str(path))
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    contenders = ["paceline", *filter(None, [against])]
    assert list(record["figures"]) == contenders
    for contender in contenders:
        assert list(record["figures"][contender]) == measures
        assert all(figures[0] > 0 for figures in record["figures"][contender].values())
    assert record["paceline_over"]["paceline"] == dict.fromkeys(measures, 1.0)


def test_ids_follow_zipfs_law_and_repeat() -> None:
    plan = Plan("sparse", 10_000, 1, 1, 1.0, ("paceline",), batch=5000)
    first, *_ = base.batches(plan, 0)
    known = set(base.id_of(np.arange(plan.size)).tolist())
    assert len(known) == plan.size, "each row has an id of its own"
    assert set(first.tolist()) <= known
    assert 0.1 < len(set(first.tolist())) / len(first) < 0.6, "frequent ones come again and again"
    assert [one.tolist() for one in base.batches(plan, 0)] == [one.tolist() for one in base.batches(plan, 0)]
