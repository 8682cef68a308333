"""`batch_norm="sync"`: real workers with unequal shares come to what one process comes to, also through a death."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.control.machines.coordinator_events import RunSettings
from paceline.strategy.options import SessionOptions
from paceline.testing.rehearsal import Died, Rehearsal
from paceline.train.session import Session
from tests.train import norm_trainers
from tests.train.norm_trainers import BATCH, LENGTH, train

pytestmark = pytest.mark.timeout(180)

UNEQUAL = RunSettings(wanted=3, fewest=1, most=3, shares=(1, 13, 6))


def run(folder: Path, function: Any, settings: RunSettings = UNEQUAL) -> list[Any]:
    with Rehearsal(function, workers=settings.wanted, folder=folder, settings=settings) as rehearsal:
        return list(rehearsal.finish())


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    (result,) = run(tmp_path_factory.mktemp("alone"), train, RunSettings(wanted=1))
    return dict(result)


def differences(result: dict[str, Any], alone: dict[str, Any]) -> dict[str, float]:
    """By tensor, the largest one beside the largest value."""
    found = {}
    for name, values in alone["state"].items():
        mine, other = torch.tensor(result["state"][name]).double(), torch.tensor(values).double()
        found[name] = float((mine - other).abs().max() / other.abs().max().clamp(min=1e-3))
    return found


def check_same(results: list[Any], alone: dict[str, Any]) -> None:
    assert results[0]["state"] == results[-1]["state"], "workers differ"
    for result in results:
        assert max(differences(result, alone).values()) < 1e-3, differences(result, alone)
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-3)
        assert result["scores"] == pytest.approx(alone["scores"], rel=1e-3)


def test_three_workers_with_unequal_shares_learn_what_one_process_learns(tmp_path: Path, alone: dict[str, Any]) -> None:
    results = run(tmp_path, partial(train, batch_norm="sync"))
    check_same(results, alone)
    assert alone["state"]["norm.num_batches_tracked"] == 2 * -(-LENGTH // BATCH)


def test_by_its_own_share_each_worker_learns_something_else(tmp_path: Path, alone: dict[str, Any]) -> None:
    """So the comparison can fail."""
    settings = RunSettings(wanted=2, fewest=2, most=2, shares=(4, 16))
    results = run(tmp_path, train, settings)
    assert max(differences(results[0], alone).values()) > 1e-2


def test_weights_of_the_loss_function_are_those_of_one_process(tmp_path: Path, alone: dict[str, Any]) -> None:
    check_same(run(tmp_path, partial(train, batch_norm="sync", weight=True)), alone)


def test_a_death_in_the_middle_of_a_forward_pass_changes_nothing(tmp_path: Path, alone: dict[str, Any]) -> None:
    function = partial(train, batch_norm="sync", on_forward=norm_trainers.die_between_layers)
    with Rehearsal(function, workers=3, folder=tmp_path, settings=UNEQUAL) as rehearsal:
        results = rehearsal.finish([0, 2])
        assert [size for _, size in rehearsal.said(0)][:4] == [3, 3, 3, 2]
    check_same(results, alone)


@pytest.mark.parametrize("catches", ["hides", "wraps"])
def test_a_loss_function_that_catches_everything_does_not_hide_a_death(
    tmp_path: Path, alone: dict[str, Any], catches: str
) -> None:
    """Else the step would count with a loss that was made up, or the worker would end for the death of another."""
    function = partial(train, batch_norm="sync", on_forward=norm_trainers.die_between_layers, catches=catches)
    with Rehearsal(function, workers=3, folder=tmp_path, settings=UNEQUAL) as rehearsal:
        results = rehearsal.finish([0, 2])
    check_same(results, alone)


def test_on_servers_too(tmp_path: Path, alone: dict[str, Any]) -> None:
    settings = RunSettings(wanted=3, fewest=1, most=3, shares=(1, 13, 6), servers=1)
    check_same(run(tmp_path, partial(train, batch_norm="sync", strategy="server"), settings), alone)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"micro_batch": 4}, "needs as many on each; use micro_batch=None"),
        ({"on_forward": norm_trainers.call_once_more}, "call the same BatchNorm layers equally often"),
        ({"in_loss": norm_trainers.call_another}, "call the same BatchNorm layers equally often"),
    ],
)
def test_what_cannot_be_exchanged_ends_the_run_and_says_why(tmp_path: Path, options: Any, says: str) -> None:
    results = run(tmp_path, partial(train, batch_norm="sync", **options))
    assert all(isinstance(result, Died) for result in results), results
    assert any("step " in result.error and says in result.error for result in results), results


def test_who_runs_out_of_memory_goes_and_the_others_go_on(tmp_path: Path, alone: dict[str, Any]) -> None:
    function = partial(train, batch_norm="sync", on_forward=norm_trainers.run_out_of_memory)
    results = run(tmp_path, function)
    assert isinstance(results[1], Died)
    assert "step 3: memory does not suffice" in results[1].error
    check_same([results[0], results[2]], alone)


def test_without_steps_there_is_nothing_to_exchange_in() -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(8, 2))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="workers do not step together"):
        Session(
            *(model, optimizer),
            data=data,
            global_batch=4,
            strategy="server",
            consistency="async",
            batch_norm="sync",
        )
    with pytest.raises(ValueError, match="workers do not step together"):
        SessionOptions(strategy="server", consistency="bounded:2", batch_norm="sync")
    with pytest.raises(ValueError, match="batch_norm='all'"):
        SessionOptions(batch_norm="all")  # type: ignore[arg-type]
