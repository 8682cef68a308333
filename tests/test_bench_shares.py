"""`paceline bench shares`: what it refuses, what it computes, and one small measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.bench.shares import measure, report
from paceline.cli.bench.shares.measure import Results
from paceline.cli.bench.shares.plan import AT_ONCE, AUTO, CNN, DDP, EQUAL, Plan
from paceline.cli.bench.shares.trainers import NUM_WARM, Trained
from typer.testing import CliRunner

from paceline.cli.main import app

PLAN = Plan(
    work=CNN,
    speeds=(1.0, 0.5),
    samples=64,
    num_rounds=2,
    seconds=1.0,
    change_every=100,
    num_changes=1,
    against=(DDP,),
)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--work", "hard"], "--work hard"),
        (["--speeds", "1"], "--speeds 1:"),
        (["--speeds", "1,0"], "--speeds 1,0:"),
        (["--speeds", "1,2"], "--speeds 1,2:"),
        (["--speeds", "fast,slow"], "--speeds fast,slow:"),
        (["--rounds", "0"], "--rounds 0"),
        (["--seconds", "0"], "--seconds 0"),
        (["--samples", "1"], "--samples 1"),
        (["--changes", "-2"], "--changes -2"),
        (["--change-every", "3"], "--change-every 3"),
        (["--json", "/nonexistent/folder/out.json"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "run", lambda *args, **kwargs: pytest.fail("measured in spite of it"))
    done = CliRunner().invoke(app, ["bench", "shares", *options])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


def some_results() -> Results:
    together = {AT_ONCE: [145.0, 140.0], AUTO: [140.0, 150.0], EQUAL: [70.0, 75.0], DDP: [60.0, 60.0]}
    return Results(
        by_quota=True,
        alone=[[100.0, 50.0], [100.0, 100.0]],
        together=together,
        shares=[[85, 43], [84, 44]],
        late_changes=[0, 1],
        changing=[0.9, 0.8],
        relief=[3, 4],
    )


def test_figures_are_parts_of_the_sum_alone_in_the_same_round() -> None:
    record = report.record(PLAN, some_results())
    assert json.loads(json.dumps(record))["of_sum_alone"][AUTO] == pytest.approx((140 / 150 + 150 / 200) / 2)
    assert record["auto_of_equal_shares"] == 2.0
    assert len(report.tables(PLAN, some_results())) == 2


def test_relief_counts_the_steps_with_the_old_share() -> None:
    courses = [[1.0, 0.5], [0.5, 1.0]]
    slower = [80] * NUM_WARM + [80] * 100 + [80] * 3 + [40] * 97
    faster = [128 - share for share in slower]
    found = [Trained(1.0, 200, shares) for shares in (slower, faster)]
    assert measure._relief(found, courses, 1, 100) == [3]
    assert measure._late_changes([slower, faster]) == 1


@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("work", "obstacle"),
    [pytest.param("cnn", "", marks=pytest.mark.soak), ("cnn", "asked for by this test"), ("timed", "")],
)
def test_everything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str, obstacle: str) -> None:
    """By quota where there is one, by sleep, and with timed work."""
    if obstacle:
        monkeypatch.setattr(measure, "quota_obstacle", lambda: obstacle)
    path = tmp_path / "out.json"
    options = ["--work", work, "--speeds", "1,0.5", "--samples", "2", "--rounds", "1", "--seconds", "0.5"]
    options += ["--change-every", "50", "--changes", "1", "--json", str(path)]
    done = CliRunner().invoke(app, ["bench", "shares", *options])
    assert done.exit_code == 0, done.stderr
    read: dict[str, Any] = json.loads(path.read_text())
    assert set(read["of_sum_alone"]) == {AT_ONCE, AUTO, EQUAL, DDP}
    assert all(part > 0 for part in read["of_sum_alone"].values())
    assert sum(read["shares"][0]) == 4
    assert len(read["of_sum_alone_while_speeds_change"]) == 1
    if obstacle or work == "timed":
        assert not read["by_quota"]
