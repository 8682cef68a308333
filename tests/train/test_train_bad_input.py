"""What cannot work is refused with a message that says why; nobody else is harmed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.shell.ticket import Ticket
from paceline.testing.rehearsal import Died, Rehearsal
from paceline.train import joining
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.bad_scripts import odd_ones
from tests.train.trainers import Numbered


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"global_batch": 11}, ValueError, r"global_batch=11 must be from 1 to the 10 samples"),
        ({"global_batch": 0}, ValueError, r"global_batch=0"),
        ({"data": Stream()}, TypeError, r"Stream is an iterable dataset"),
        ({"data": []}, ValueError, r"empty"),
        ({"clip_norm": -1.0}, ValueError, r"clip_norm"),
        ({"micro_batch": 0}, ValueError, r"micro_batch"),
        ({"nonfinite": "ignore"}, ValueError, r"nonfinite"),
        ({"order": lambda *_: [0]}, ValueError, r"1 indices for epoch 0"),
        ({"order": 1}, TypeError, r"order=1: give a function"),
        ({"seed": 1.5}, TypeError, r"seed=1.5: give a whole number"),
        ({"loader": 1}, TypeError, r"loader=1: give a LoaderOptions"),
        ({"micro_batch": 1.5}, TypeError, r"micro_batch=1.5"),
        ({"checkpoints": None}, TypeError, r"checkpoints=None"),
        ({"consistency": None}, TypeError, r"consistency=None: give 'sync'"),
    ],
)
def test_what_a_session_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = nn.Linear(8, 3)
    options = {"data": Numbered(10), "global_batch": 4, **options}
    with pytest.raises(error, match=message):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("wrong", [{"keep_last": 0}, {"keep_best": -1}, {"every_s": math.nan}])
def test_settings_of_checkpoints_are_refused_when_they_are_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Checkpoints(**wrong)


def test_a_session_needs_an_optimizer_and_things_with_a_state() -> None:
    model = nn.Linear(8, 3)
    with pytest.raises(TypeError, match="needs an optimizer"):
        Session(model, data=Numbered(10), global_batch=4)
    with pytest.raises(TypeError, match="int has no state_dict"):
        Session(model, torch.optim.SGD(model.parameters(), lr=0.1), 3, data=Numbered(10), global_batch=4)  # type: ignore[arg-type]


REFUSALS = {
    1: ("model", "0.weight float32 [5, 8]"),
    2: ("data", "fingerprint is"),
    3: ("length", "41"),
    4: ("torch", "the version of torch is 1.0.0 here"),
    5: ("paceline", "the version of Paceline is 0.0.1 here"),
    6: ("seed", "seed is 2 here"),
    7: ("global_batch", "global_batch is 10 here"),
    8: ("shuffle", "the order of samples is in the order of the data here"),
    9: ("order", "the order of samples is in the script's own order"),
}


def test_newcomers_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    """And the run goes on without them."""
    enough = tmp_path / "enough"
    faults = {number: fault for number, (fault, _) in REFUSALS.items()} | {10: "swallows"}
    settings = RunSettings(wanted=1, fewest=1)
    with Rehearsal(odd_ones, faults, str(enough), workers=1, folder=tmp_path, settings=settings) as run:
        run.wait_said(0, 1)
        for _ in faults:
            run.add()
        results = run.finish(list(REFUSALS))
        for result, (_, message) in zip(results, REFUSALS.values(), strict=True):
            assert "Refused" in result.error
            assert message in result.error
        assert {size for _, size in run.said(0)} == {1}
        assert run.finish([10]) == [{"swallowed": True}], "a process that was refused ends, whatever its script does"
        assert len(run.events("refused")) == len(faults)
        enough.touch()
        (result,) = run.finish([0])
        assert result["steps"] % 5 == 0


def test_a_learning_rate_that_differs_is_named_and_fails_the_run(tmp_path: Path) -> None:
    with Rehearsal(odd_ones, {1: "rate"}, workers=2, folder=tmp_path) as run:
        run.exhausted = True
        for result in run.finish():
            assert "hyper-parameters differ" in result.error
            assert "lr of SGD 0, group 0" in result.error
        run.wait_for(lambda: run.coordinator.poll() is not None)
        with run.reader() as reader:
            assert "lr of SGD 0, group 0" in reader.status().reason


@pytest.mark.parametrize(
    ("fault", "here", "there"),
    [
        ("detour", "here decide", "step"),
        ("exit", "the script ended on this worker after operation 3", "step"),
        ("ends", "here end", "decide"),
    ],
)
def test_a_script_that_takes_another_way_on_one_worker(tmp_path: Path, fault: str, here: str, there: str) -> None:
    """It does another operation than the others at that place: that has an end, and a message that says so."""
    with Rehearsal(odd_ones, {1: fault}, workers=2, folder=tmp_path) as run:
        run.exhausted = True
        results = run.finish(timeout_s=30.0)
        assert all(isinstance(result, Died) and result.code != 0 for result in results)
        assert f"here {there}" in run.log(0)
        assert here in run.log(1)
        run.wait_for(lambda: run.coordinator.poll() is not None)
        assert run.coordinator.returncode == 1


def test_a_script_that_raises_before_its_first_step(tmp_path: Path) -> None:
    settings = RunSettings(wanted=3, fewest=2, grace_s=0.5)
    with Rehearsal(odd_ones, {1: "before"}, workers=3, folder=tmp_path, settings=settings) as run:
        results = run.finish()
        assert "does not even start" in results[1].error
        assert results[0]["steps"] == results[2]["steps"] == 10


def two_sessions() -> dict[str, str]:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Session(model, optimizer, data=Numbered(10), global_batch=4) as session:
        for epoch in session.epochs(1):
            for batch in epoch:
                session.step(lambda x, y, _: model(x).sum(), batch)
    try:
        Session(model, optimizer, data=Numbered(10), global_batch=4)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


def test_a_second_session_in_a_worker_is_refused(tmp_path: Path) -> None:
    with Rehearsal(two_sessions, workers=2, folder=tmp_path) as run:
        for result in run.finish():
            assert "has a session of the run" in result["error"]


def test_a_session_whose_constructor_raised_leaves_its_place_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = Ticket(run="r", folder="", address=("", 0), local_name="", host="", secret=b"", fingerprint=b"", tls=False)
    tickets = iter([ticket])
    monkeypatch.setattr(joining, "_joined_run", "")
    monkeypatch.setattr(joining, "_unused", None)
    monkeypatch.setattr("paceline.control.shell.ticket.inherited", lambda: next(tickets, None))
    model = torch.nn.Linear(2, 1)
    with pytest.raises(ValueError, match="global_batch=99"):
        Session(model, torch.optim.SGD(model.parameters(), 0.1), data=[1, 2, 3], global_batch=99)
    assert joining._joined_run == ""
    assert joining.find_ticket() is ticket
