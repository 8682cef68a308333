"""A session's steps against plain torch, with workers without samples, odd models, odd settings; and its misuse."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.checkpoint import Contents, find, read, write
from paceline.checkpoint.files import Skipped
from paceline.control.messages.plan import NOTHING
from paceline.errors import Evicted, NonFiniteGradient
from paceline.testing.rehearsal import Rehearsal
from paceline.train import saving, sources
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from tests.train.step_scripts import (
    loader_steps,
    nonfinite_steps,
    odd_steps,
    reference_odd_steps,
    reference_scores,
    staged_script,
    statistics_steps,
)
from tests.train.trainers import BATCH, LENGTH, Numbered, check_alike, check_samples


def check_close(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert found["weights"] == pytest.approx(expected["weights"], abs=1e-5)


def test_alone_it_is_plain_torch() -> None:
    found = odd_steps(11, 4, 3)
    check_close(found, reference_odd_steps(11, 4, 3))
    assert not found["unused"]


@pytest.mark.parametrize(("length", "batch"), [(11, 5), (5, 2)])
def test_three_workers_with_few_samples_are_plain_torch(tmp_path: Path, length: int, batch: int) -> None:
    """Shares of 0, tied, unused, partly used and frozen parameters, two optimizers, a schedule, clipping, pieces."""
    with Rehearsal(odd_steps, length, batch, 3, workers=3, folder=tmp_path) as run:
        first, *others = run.finish()
        assert all(other == first for other in others), run.log(0)
        check_close(first, reference_odd_steps(length, batch, 3))
        assert not first["unused"]


def test_batch_statistics_dropout_and_a_skipped_step(tmp_path: Path) -> None:
    with Rehearsal(statistics_steps, workers=3, folder=tmp_path) as run:
        first, *others = run.finish()
        assert isinstance(first, dict), first.error
        for other in others:
            assert all(other[what] == first[what] for what in ("weights", "losses", "skipped", "score"))
        assert first["skipped"] == 1
        assert [result["was_main"] for result in (first, *others)].count(True) == 1, "before the loop too"
        assert all(math.isfinite(value) for value in first["weights"])
        assert all(size != 1 for result in (first, *others) for size in result["sizes"])


def test_a_gradient_that_is_not_finite_names_its_worker(tmp_path: Path) -> None:
    with Rehearsal(nonfinite_steps, workers=2, folder=tmp_path) as run:
        run.exhausted = True
        members = run.wait_for(lambda: members if len(members := run.members()) == 2 else None)
        results = run.finish()
        for result in results:
            assert "NonFiniteGradient" in result.error
            assert "the gradient of bias on worker" in result.error
            assert list(members.values())[1] in result.error
        run.wait_for(lambda: run.coordinator.poll() is not None)
        assert run.coordinator.returncode == 1


def test_results_outside_of_the_loops_reach_a_worker_that_comes_late(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(staged_script, str(enough), workers=2, folder=tmp_path) as run:
        run.wait_said(0, 8)  # in the second loop
        run.add()
        run.wait_said(2, 3)
        enough.touch()
        results = run.finish()
        assert all(isinstance(result, dict) for result in results), results
        first = results[0]
        assert all(result == first for result in results)
        assert first["state"] == {"greeting": "hello", "numbers": list(range(1, first["steps"] + 1))}
        before, between, is_best, decision, after = first["seen"]
        assert before["all"] == [0, 1]
        assert between["all"] == list(range(40))
        assert (is_best, decision) == (True, False)
        expected = reference_scores(first["weights"], 40)
        assert after["all"] == expected["all"]
        assert after["right"] == expected["right"]
        assert after["loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_loader_workers_survive_the_death_of_a_peer(tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    with Rehearsal(loader_steps, str(enough), workers=3, folder=tmp_path) as run:
        run.wait_said(0, 3)
        run.kill(1)
        run.wait_said(0, len(run.said(0)) + 5)
        enough.touch()
        results = run.finish([0, 2])
        check_alike(results)
        check_samples(results, results[0]["steps"] // -(-LENGTH // BATCH), lost=True)


# -- alone, in this process ------------------------------------------------------------------------------------------


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[Session, Callable[..., torch.Tensor]]]]:
    made: list[Session] = []

    def make_session(**options: Any) -> tuple[Session, Callable[..., torch.Tensor]]:
        model = nn.Linear(8, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"data": Numbered(10), "global_batch": 4, **options}
        session = Session(model, optimizer, **options)
        made.append(session)

        def loss_fn(x: torch.Tensor, y: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(model(x), y)

        return session, loss_fn

    yield make_session
    for session in reversed(made):  # each gives back the signal handler that it found
        session.close()


Make = Callable[..., tuple[Session, Callable[..., torch.Tensor]]]


def test_step_is_called_once_for_each_batch(make: Make) -> None:
    session, loss_fn = make()
    batches = iter(next(session.epochs(1)))
    next(batches)
    with pytest.raises(RuntimeError, match=r"session\.step was not called"):
        next(batches)
    session, loss_fn = make()
    batches = iter(next(session.epochs(1)))
    batch = next(batches)
    session.step(loss_fn, batch)
    with pytest.raises(RuntimeError, match="another batch"):
        session.step(loss_fn, batch)
    batch = next(batches)
    with pytest.raises(RuntimeError, match="another batch"):
        session.step(loss_fn, list(batch))


def test_an_epoch_is_gone_through_or_the_loop_over_epochs_left(make: Make) -> None:
    session, loss_fn = make()
    epochs = session.epochs(2)
    for batch in next(epochs):
        session.step(loss_fn, batch)
        break
    with pytest.raises(RuntimeError, match="leave the loop over epochs too"):
        next(epochs)
    session, loss_fn = make()
    for epoch in session.epochs(2):
        for batch in epoch:
            session.step(loss_fn, batch)
        break
    assert session.steps == 3


def test_epochs_may_be_asked_for_again(make: Make) -> None:
    session, loss_fn = make()
    numbers = []
    for count in (1, 2):
        for epoch in session.epochs(count):
            numbers.append(epoch.number)
            for batch in epoch:
                session.step(loss_fn, batch)
    assert numbers == [0, 1, 2]
    assert session.steps == 9


def test_a_closed_session_says_so(make: Make) -> None:
    session, loss_fn = make()
    with session:
        for epoch in session.epochs(1):
            for batch in epoch:
                session.step(loss_fn, batch)
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.should_stop(1.0, patience=1)
    with pytest.raises(RuntimeError, match="closed"):
        next(session.epochs(1))
    with pytest.raises(RuntimeError, match="closed"):
        session.evaluate(lambda *_: {}, Numbered(4))


def test_what_the_script_does_with_results_is_its_own_affair(make: Make) -> None:
    """What is kept for others does not change when the script changes what it was given."""
    session, _ = make()
    scores = session.evaluate(lambda x, y, number: {"loss": 1.0}, Numbered(10))
    scores.clear()
    assert session._parts.ledger.gift(whole=False)["outcome"] == {"loss": 1.0}
    assert session._parts.ledger.gift(whole=True)["book"]["outside"] == [{"loss": 1.0}]


def test_alone_a_gradient_that_is_not_finite_stops(make: Make) -> None:
    session, loss_fn = make()
    batch = next(iter(next(session.epochs(1))))
    before = session._parts.ledger.gift(whole=True)["update"]["model"]["weight"].clone()
    with pytest.raises(NonFiniteGradient, match="the gradient of bias"):
        session.step(lambda *one: loss_fn(*one) * float("nan"), batch)
    assert torch.equal(before, session._parts.ledger.gift(whole=True)["update"]["model"]["weight"])


def test_alone_it_resumes_where_it_says_so(tmp_path: Path, make: Make) -> None:
    checkpoints = Checkpoints(folder=tmp_path, every_s=None, every_steps=2, resume=True)
    for expected in (3, 6):
        session, loss_fn = make(checkpoints=checkpoints)
        with session:
            for epoch in session.epochs(expected // 3):
                for batch in epoch:
                    session.step(loss_fn, batch)
        assert session.steps == expected


def stop_after_two(session: Session, loss_fn: Callable[..., torch.Tensor]) -> None:
    for epoch in session.epochs(5):
        for batch in epoch:
            session.step(loss_fn, batch)
        if session.should_stop(math.inf if epoch.number == 1 else -float(session.steps), patience=0):
            break


def test_who_comes_after_the_decision_to_stop_early_leaves_the_loop_too(make: Make) -> None:
    """It runs the script from its top; the others are behind the loop already."""
    session, loss_fn = make()
    stop_after_two(session, loss_fn)
    later, loss_fn = make()
    later._run.seat()
    later._parts.ledger.book = session._parts.ledger.book.copy()
    stop_after_two(later, loss_fn)
    assert later.steps == session.steps == 6
    assert [epoch.number for epoch in itertools.islice(later.epochs(5), 1)] == [5], "the next loop is another one"


def test_a_run_that_stopped_early_and_is_resumed_goes_on(tmp_path: Path, make: Make) -> None:
    """That is what its user wants: it has come to its end before."""
    for expected in (6, 15):
        session, loss_fn = make(checkpoints=Checkpoints(folder=tmp_path, every_s=None, resume=True))
        stop_after_two(session, loss_fn)
        session.close()
        assert session.steps == expected


def test_a_decision_to_stop_that_the_script_does_not_follow_stops_nothing(make: Make) -> None:
    session, loss_fn = make()
    for epoch in session.epochs(3):
        for batch in epoch:
            session.step(loss_fn, batch)
        session.should_stop(math.inf, patience=0)
    assert session.steps == 9


def test_a_score_keeps_the_best_model_and_stops_nothing(tmp_path: Path, make: Make) -> None:
    checkpoints = Checkpoints(folder=tmp_path, every_s=None, every_steps=1, keep_last=1)
    session, loss_fn = make(checkpoints=checkpoints)
    answers, weights = [], []
    for epoch, score in zip(session.epochs(3), (0.1, 0.7, 0.3), strict=True):
        for batch in epoch:
            session.step(loss_fn, batch)
        answers.append(session.score(score, mode="max"))
        weights.append(session._parts.ledger.gift(whole=True)["update"]["model"]["weight"].clone())
    session.close()
    assert answers == [True, True, False]
    assert session.steps == 9
    assert torch.equal(read(tmp_path / "best").model["weight"], weights[1])
    with pytest.raises(ValueError, match="mode='least'"):
        session.score(0.5, mode="least")  # type: ignore[arg-type]


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_a_bad_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main worker of a run that is going on removes old ones while newcomers look."""
    gone = Skipped(tmp_path / "step-000000001-op-1", "it is not there any more")
    answers = [(None, [gone]), (None, [])]
    monkeypatch.setattr(sources, "newest_good", lambda _: answers.pop(0))
    saver = saving.Saver(Checkpoints(), tmp_path, lambda kind, text: pytest.fail(f"{kind}: {text}"))
    assert saver.newest() is None
    assert not answers


def checkpoint_of(folder: Path, operation: int) -> None:
    model = {"weight": torch.full((3,), float(operation))}
    contents = Contents(
        run="r", step=operation, operation=operation, epoch=0, position=operation, model=model, state={}, plan={}
    )
    write(folder, contents)


def test_a_worker_that_waits_sees_newer_checkpoints_and_starts_from_the_one_it_was_told(tmp_path: Path) -> None:
    told: list[str] = []
    saver = saving.Saver(Checkpoints(), tmp_path, lambda kind, text: told.append(f"{kind}: {text}"))
    assert saver.newest_name() == NOTHING
    for operation in (3, 6, 9):
        checkpoint_of(tmp_path, operation)
    assert saver.newest_name() == 9
    assert saver.read(6).model["weight"].tolist() == [6.0, 6.0, 6.0]
    saver.abandon_after(6)
    assert [found.operation for found in find(tmp_path)] == [6, 3]
    assert told == ["skipped checkpoint: operation 9: the run starts again from 6"]
    (tmp_path / "step-000000006-op-6" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Evicted, match="operation 6 cannot be read"):
        saver.read(6)
    assert saver.newest_name() == 3


def test_results_after_the_loop_are_computed_again_when_the_loop_went_on(tmp_path: Path, make: Make) -> None:
    """A script that validates before and after its loop, resumed twice with more epochs than at first."""
    data = Numbered(20)
    folder = Checkpoints(folder=tmp_path, every_s=None, resume=True)

    def run(epochs: int) -> list[float]:
        session, loss_fn = make(checkpoints=folder)
        weight = session._parts.model.state_dict()["weight"]

        def validate(*_: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"norm": weight.norm()}

        scores = [session.evaluate(validate, data)["norm"]]
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.step(loss_fn, batch)
        scores.append(session.evaluate(validate, data)["norm"])
        session.close()
        return scores

    first, second, third = run(1), run(3), run(3)
    assert first[0] == second[0] == third[0]  # recorded: it was done before the training
    assert second[1] != first[1]
    assert third[1] == second[1]


def test_what_the_body_changes_before_a_step_is_not_counted_twice_on_resume(tmp_path: Path, make: Make) -> None:
    for epochs in (1, 2):
        session, loss_fn = make(checkpoints=Checkpoints(folder=tmp_path, every_s=None, every_steps=2, resume=True))
        for epoch in session.epochs(epochs):
            for batch in epoch:
                session.state["seen"] = session.state.get("seen", 0) + 1
                session.step(loss_fn, batch)
                session.state["done"] = session.state.get("done", 0) + 1
        session.close()
        if epochs == 1:
            shutil.rmtree((tmp_path / "latest").resolve())  # what is left was taken just before a step
            (tmp_path / "latest").unlink()
    assert session.state["seen"] == session.state["done"] == session.steps == 6
