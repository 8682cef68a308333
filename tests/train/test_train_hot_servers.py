"""A hot server of a real run gives ranges away, and the result is that of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.control.machines.coordinator_events import RunSettings
from paceline.server.layout import NUM_PARTITIONS
from paceline.testing.rehearsal import Rehearsal
from tests.train.skewed_trainers import STEPS, Skewed, rows_take_time, the_first_is_slow, train_skewed

torch.set_num_threads(1)

PATIENCE_S = 240.0  # what a server measures on a machine that is busy otherwise is vague, and takes longer to be clear

pytestmark = pytest.mark.timeout(600)


def begin(run: Rehearsal, folder: Path, most: int = 0) -> tuple[str, list[int]]:
    """Say which ranges of rows are to be used: so many of those of the first server, or all. It, and these ranges."""
    placement = run.wait_for(lambda: run.placement() if run.placement().ranges else None)
    first = len(placement.ranges) - NUM_PARTITIONS
    pids = {row["pid"]: row["member"] for row in run.ask("status")["members"]}
    crowded = pids[run.servers[0].pid]
    hot = [number for number in placement.ranges_of[crowded] if number >= first][:most]
    hot = hot or list(range(first, len(placement.ranges)))
    (folder / "hot.tmp").write_text(json.dumps([number - first for number in hot]))
    (folder / "hot.tmp").rename(folder / "hot")
    return crowded, hot


def finish(run: Rehearsal, folder: Path) -> None:
    """The training ends, and has come to what one process comes to."""
    (folder / "enough").touch()
    (result,) = run.finish()
    assert isinstance(result, dict), result
    assert not run.events("lost ranges")
    alone = train_skewed(Skewed(str(folder), result["steps"] // STEPS, is_alone=True))
    for name in ("rows", "parameters"):
        torch.testing.assert_close(result[name], alone[name], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("coordinator_dies", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_hot_server_gives_ranges_away_while_training_goes_on(tmp_path: Path, coordinator_dies: bool) -> None:
    """All rows that are used are in eight ranges, which one server has at first."""
    case, settings = Skewed(str(tmp_path)), RunSettings(wanted=1, servers=2, silence_s=5.0)
    with Rehearsal(
        train_skewed, case, workers=1, folder=tmp_path, settings=settings, prepare_server=rows_take_time
    ) as run:
        crowded, hot = begin(run, tmp_path, 8)

        def num_given_away() -> int:
            return sum(run.placement().ranges[number].primary.server != crowded for number in hot)

        run.wait_for(lambda: num_given_away() >= 1, PATIENCE_S)
        if coordinator_dies:
            run.kill_coordinator()
            run.start_coordinator()
            run.wait_for(lambda: num_given_away() >= 3, PATIENCE_S)
        told = run.events("hot server")
        assert told
        assert all(text.startswith(f"{crowded} has ") and " to " in text for text in told[:2])
        finish(run, tmp_path)


@pytest.mark.soak
def test_a_slow_machine_gives_ranges_away_to_one_that_is_not(tmp_path: Path) -> None:
    case, settings = Skewed(str(tmp_path)), RunSettings(wanted=1, servers=2, silence_s=5.0)
    with Rehearsal(
        train_skewed, case, workers=1, folder=tmp_path, settings=settings, prepare_server=the_first_is_slow
    ) as run:
        slow, _ = begin(run, tmp_path)
        before = len(run.placement().ranges_of[slow])
        run.wait_for(lambda: len(run.placement().ranges_of[slow]) < before - 1, PATIENCE_S)
        assert all(text.startswith(f"{slow} has ") for text in run.events("hot server"))
        finish(run, tmp_path)
