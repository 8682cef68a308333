"""`fit` is the loop one would write: bit for bit alone, and the same on all workers when they come and go."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from paceline.engine.speeds import PROBE_VARIABLE
from paceline.strategy.options import SessionOptions
from paceline.testing.rehearsal import Died, Rehearsal, say
from paceline.train import warming
from paceline.train.callbacks import Callback, EpochInfo, JsonLines, RunInfo, StepInfo, ValidationInfo
from paceline.train.fitting import Fitted, fit
from paceline.train.rates import Rates, WarmUp
from paceline.train.saving import Checkpoints
from paceline.train.session import Session
from paceline.train.task import Best, EarlyStopping, Task, Validation
from paceline.train.warming import warm_up
from tests.train.trainers import BATCH, LENGTH, Numbered, make_model

STEPS = -(-LENGTH // BATCH)


def loss_of(model: nn.Module) -> Callable[..., torch.Tensor]:
    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(x), y)

    return loss_fn


def scores_of(model: nn.Module) -> Callable[..., dict[str, Any]]:
    def validate(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> dict[str, Any]:
        logits = model(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).float().mean()}

    return validate


def first_model() -> nn.Module:
    torch.manual_seed(1)
    return make_model()


def make_task(model: nn.Module | None = None, **fields: Any) -> Task:
    model = model or first_model()
    fields.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-2))
    fields.setdefault("data", Numbered())
    fields.setdefault("loss_fn", loss_of(model))
    fields.setdefault("epochs", 2)
    fields.setdefault("global_batch", BATCH)
    return Task(model=model, **fields)


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


class Noting(Callback):
    """Notes every call; fails where it is told to."""

    def __init__(self, fail_at: int = -1) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._fail_at = fail_at

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.step))

    def on_step(self, info: StepInfo) -> None:
        self.calls.append(("step", info.step))
        if info.step == self._fail_at:
            raise OSError("no disk")

    def on_validation(self, scores: Mapping[str, Any], info: ValidationInfo) -> None:
        self.calls.append(("validation", info.step))

    def on_epoch_end(self, info: EpochInfo) -> None:
        self.calls.append(("epoch", info.epoch))

    def on_stop(self, reason: str) -> None:
        self.calls.append(("stop", reason))

    def on_error(self, error: BaseException) -> None:
        self.calls.append(("error", str(error)))


# -- alone -----------------------------------------------------------------------------------------------------------


def delicate_model() -> nn.Sequential:
    """Everything that a call too many would be seen in: random numbers, batch statistics."""
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Tanh(), nn.Linear(16, 3))


def test_fit_is_the_loop_that_one_would_write() -> None:
    model, data = delicate_model(), Numbered()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.9)
    session = Session(model, optimizer, schedule, data=data, global_batch=BATCH, seed=3, clip_norm=1.0)
    losses, scores = [], []
    for epoch in session.epochs(3):
        for batch in epoch:
            losses.append(session.step(loss_of(model), batch))
            schedule.step()
        scores.append(session.evaluate(scores_of(model), data))
        if session.should_stop(scores[-1]["loss"], patience=3):
            break
    session.close()

    fitted_model = delicate_model()
    fitted_optimizer = torch.optim.AdamW(fitted_model.parameters(), lr=1e-2)
    fitted = fit(
        make_task(
            fitted_model,
            optimizer=fitted_optimizer,
            schedule=torch.optim.lr_scheduler.StepLR(fitted_optimizer, step_size=5, gamma=0.9),
            data=data,
            epochs=3,
            validation=Validation(data=data, validate=scores_of(fitted_model), best=EarlyStopping(restore=False)),
            options=SessionOptions(seed=3, clip_norm=1.0),
        )
    )
    assert digest(fitted_model) == digest(model)
    assert fitted_optimizer.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [dict(one.scores) for one in fitted.validations] == scores
    assert [dict(one.scores) for one in fitted.history] == scores
    assert fitted.scores == scores[-1]
    assert (fitted.reason, fitted.steps, fitted.skipped) == ("finished", 3 * STEPS, 0)
    weights = [BATCH] * (STEPS - 1) + [LENGTH - BATCH * (STEPS - 1)]
    expected = sum(one * weight for one, weight in zip(losses[:STEPS], weights, strict=True)) / LENGTH
    assert fitted.history[0].loss == pytest.approx(expected, rel=1e-12)


def test_rates_are_those_of_the_schedule() -> None:
    class Rated(Callback):
        def __init__(self) -> None:
            self.rates: list[float] = []

        def on_step(self, info: StepInfo) -> None:
            self.rates.extend(info.rates)

    rated = Rated()
    rates = Rates(base_batch=8, scale="linear", warm_up=WarmUp(steps=4), schedule="cosine")
    fit(make_task(schedule=rates, callbacks=[rated]))
    expected = [1e-2 * rates.factor(step, global_batch=BATCH, num_steps=2 * STEPS) for step in range(2 * STEPS)]
    assert rated.rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [13, 26, 39]),
        ({"every_epochs": 2}, [26, 39]),
        ({"every_epochs": None, "every_steps": 10}, [10, 20, 30, 39]),
        ({"every_steps": 13}, [13, 26, 39]),
        ({"every_epochs": 3, "every_steps": 26}, [26, 39]),
    ],
)
def test_validation_is_done_when_it_is_due_and_once(settings: dict[str, Any], expected: list[int]) -> None:
    fitted = fit(make_task(epochs=3, validation=Validation(data=Numbered(40), **settings)))
    assert [one.step for one in fitted.validations] == expected
    assert [one.epoch for one in fitted.history] == [0, 1, 2]


def test_the_score_without_validate_is_the_exact_mean_of_the_loss() -> None:
    model = first_model()

    def weighted(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> Any:
        weights = 1.0 + numbers % 3
        each = F.cross_entropy(model(x), y, reduction="none")
        return (each * weights).sum() / weights.sum(), weights.sum()

    data = Numbered(50)
    task = make_task(model, epochs=1, loss_fn=weighted, validation=Validation(data=data, batch=7))
    fitted = fit(task)
    whole = [
        torch.stack([torch.as_tensor(sample[part]) for sample in map(data.__getitem__, range(50))]) for part in range(3)
    ]
    with torch.no_grad():
        assert fitted.scores["loss"] == pytest.approx(float(weighted(*whole)[0]), rel=1e-5)


def test_a_batch_that_is_a_dict_is_passed_as_it_is() -> None:
    """The loss, the validation that is made of it, and the warm-up."""
    model = first_model()
    data = [{"x": torch.randn(8), "label": number % 3} for number in range(20)]
    kinds: list[type] = []

    def loss_fn(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        kinds.append(type(batch))
        return F.cross_entropy(model(batch["x"]), batch["label"])

    fitted = fit(make_task(model, loss_fn=loss_fn, data=data, epochs=1, validation=Validation(data=data)))
    assert set(kinds) == {dict}
    assert fitted.scores["loss"] > 0
    with pytest.raises(TypeError, match=r"a dict is passed as one argument: write def loss_fn\(batch\)"):
        fit(make_task(loss_fn=lambda x, label: None, data=data, epochs=1))


class Scripted:
    """A validation whose scores are given; also notes the weights at each."""

    def __init__(self, model: nn.Module, scores: list[float]) -> None:
        self._model = model
        self._scores = scores
        self.digests: list[str] = []

    def __call__(self, *batch: Any) -> dict[str, Any]:
        self.digests.append(digest(self._model))
        return {"score": self._scores[len(self.digests) - 1]}


def test_early_stopping_and_the_best_weights() -> None:
    model = first_model()
    scripted = Scripted(model, [3.0, 5.0, 4.0, 5.0, 1.0, 9.0])
    best = EarlyStopping(metric="score", mode="max", patience=2)
    task = make_task(model, epochs=6, validation=Validation(data=Numbered(10), validate=scripted, best=best))
    fitted = fit(task)
    assert fitted.reason == "early stopping"
    assert [one.is_best for one in fitted.validations] == [True, True, False, False, False]
    assert fitted.best == fitted.validations[1]
    assert fitted.scores["score"] == 1.0
    assert fitted.steps == 5 * STEPS
    assert digest(task.model) == scripted.digests[1] != scripted.digests[4]


def test_early_stopping_in_the_middle_of_an_epoch() -> None:
    model = first_model()
    scripted = Scripted(model, [1.0, 2.0, 2.0])
    validation = Validation(
        data=Numbered(10),
        validate=scripted,
        every_epochs=None,
        every_steps=5,
        best=EarlyStopping(metric="score", patience=0),
    )
    noting = Noting()
    fitted = fit(make_task(model, validation=validation, callbacks=[noting]))
    assert (fitted.reason, fitted.steps, fitted.history) == ("early stopping", 10, ())
    assert noting.calls[-2:] == [("validation", 10), ("stop", "early stopping")]


def test_the_last_weights_stay_where_the_best_are_not_wanted_or_there_are_none() -> None:
    for scores, best in ([1.0, 2.0], Best(metric="score", restore=False)), ([float("nan")] * 2, Best(metric="score")):
        model = first_model()
        scripted = Scripted(model, scores)
        task = make_task(model, validation=Validation(data=Numbered(10), validate=scripted, best=best))
        fitted = fit(task)
        assert digest(task.model) == scripted.digests[1] != scripted.digests[0]
        assert (fitted.best is None) == (best.restore)


def test_callbacks_are_called_in_order() -> None:
    noting = Noting()
    fit(make_task(global_batch=100, validation=Validation(data=Numbered(10), every_epochs=2), callbacks=[noting]))
    assert noting.calls == [
        ("start", 0),
        ("step", 1),
        ("step", 2),
        ("step", 3),
        ("epoch", 0),
        ("step", 4),
        ("step", 5),
        ("step", 6),
        ("validation", 6),
        ("epoch", 1),
        ("stop", "finished"),
    ]


def test_an_exception_of_a_callback_ends_the_training() -> None:
    noting = Noting(fail_at=3)
    with pytest.raises(OSError, match="no disk"):
        fit(make_task(callbacks=[noting]))
    assert noting.calls[-2:] == [("step", 3), ("error", "no disk")]


def test_a_run_that_is_asked_to_stop_says_so(tmp_path: Path) -> None:
    class Asking(Callback):
        def on_step(self, info: StepInfo) -> None:
            if info.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.001 if info.step >= 3 else 0.0)  # the signal is heard on another thread

    with pytest.raises(SystemExit):
        fit(make_task(epochs=1000, callbacks=[Asking(), JsonLines(tmp_path / "lines")]))
    lines = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert lines[-1] == {"kind": "stop", "reason": "left"}
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(1, len(steps) + 1))


def test_a_resumed_training_is_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    def task(scores: list[float], resume: bool, callbacks: Any = (), epochs: int = 4) -> Task:
        model = make_model() if resume else first_model()
        return make_task(
            model,
            epochs=epochs,
            schedule=Rates(schedule="cosine"),
            validation=Validation(
                data=Numbered(10), validate=Scripted(model, scores), best=EarlyStopping(metric="score", patience=2)
            ),
            checkpoints=Checkpoints(folder=tmp_path if callbacks or resume else None, every_steps=5, resume=resume),
            callbacks=callbacks,
        )

    scores = [4.0, 1.0, 2.0, 3.0]
    whole = task(scores, resume=False)
    expected = fit(whole)
    with pytest.raises(OSError, match="no disk"):
        fit(task(scores, resume=False, callbacks=[Noting(fail_at=2 * STEPS + 6)]))
    torch.manual_seed(77)
    rest = task(scores[2:], resume=True)
    noting = Noting()
    assert fit(dataclasses.replace(rest, callbacks=[noting])) == expected
    assert digest(rest.model) == digest(whole.model), "the best weights are from before the resume"
    assert noting.calls[0][1] >= 2 * STEPS

    again = task([], resume=True)
    assert fit(again) == expected, "it had ended"
    assert digest(again.model) == digest(whole.model)
    longer = task([5.0, 6.0], resume=True, epochs=6)
    fitted = fit(longer)
    assert (fitted.reason, fitted.steps) == ("early stopping", 5 * STEPS)
    stopped = fit(task([], resume=True, epochs=6))
    assert stopped == fitted, "what was stopped early stays so"


# -- the first, discarded call ---------------------------------------------------------------------------------------


def numpy_state() -> str:
    return str(np.random.get_state(legacy=False))


def test_a_warm_up_tries_the_model_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(warming, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(warming, "_tried", [])
    model, counts = make_model(), []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        counts.append(len(x))
        clock.now += 0.004 + 0.001 * len(x)
        return F.cross_entropy(model(x), y)

    warm_up(model, loss_fn, Numbered())
    assert counts == [2]
    assert warming.tried_pace() is None
    monkeypatch.setenv(PROBE_VARIABLE, "0.4")
    counts.clear()
    warm_up(model, loss_fn, Numbered())
    # After the trials with 32 samples 0.25 s are over, after those with 64 it is 0.45 s.
    assert counts == [2, *(count for count in (2, 4, 8, 16, 32, 64) for _ in range(3))]
    monkeypatch.setenv(PROBE_VARIABLE, "100")
    warm_up(model, loss_fn, Numbered())
    assert max(counts) == 128 <= len(Numbered()), "twice as many are more than there are"
    assert warming.tried_pace() == pytest.approx((0.004, 0.001))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_warm_up_leaves_no_trace() -> None:
    class Counting(nn.Module):
        calls: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = delicate_model()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            random.random()
            np.random.rand()
            self.calls = self.calls + 1  # another tensor in its place
            found: torch.Tensor = self.inner(x)
            return found

    model = Counting()
    kept = torch.ones(3)
    model.inner[4].bias.grad = kept
    before, calls = digest(model), model.calls
    states = random.getstate(), numpy_state(), torch.get_rng_state()
    sizes: list[int] = []

    def loss_fn(x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return F.cross_entropy(model(x), y)

    warm_up(model, loss_fn, Numbered(), samples=3)
    assert sizes == [3]
    assert digest(model) == before
    assert model.calls is calls
    assert [parameter.grad is None for parameter in model.parameters()].count(False) == 1
    assert model.inner[4].bias.grad is kept
    assert kept.tolist() == [1.0, 1.0, 1.0]
    assert random.getstate() == states[0]
    assert numpy_state() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


# -- bad settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: make_task(global_batch=0), "global_batch=0"),
        (lambda: make_task(global_batch=LENGTH + 1), f"global_batch={LENGTH + 1}.*the {LENGTH} samples"),
        (lambda: make_task(epochs=0), "epochs=0"),
        (lambda: make_task(epochs=True), "epochs=True"),
        (lambda: make_task(optimizer=[]), r"optimizer=\[\]"),
        (lambda: make_task(loss_fn=3), "loss_fn=3"),
        (lambda: make_task(data=[]), "empty"),
        (lambda: make_task(validation=Numbered()), r"validation=Numbered.*give Validation"),
        (lambda: make_task(callbacks=[print]), "callbacks=.*derives from Callback"),
        (lambda: make_task(checkpoints="here"), "checkpoints='here'"),
        (lambda: make_task(options=3), "options=3"),
        (lambda: make_task(schedule="cosine"), "schedule='c'|give Rates"),
        (lambda: make_task(schedule=Rates(warm_up=WarmUp(steps=99))), "WarmUp.steps=99. is not shorter"),
        (lambda: make_task(schedule=_foreign_schedule()), "StepLR.*does not have"),
        (lambda: make_task(schedule=_plateau()), "ReduceLROnPlateau.*Session"),
        (lambda: make_validation(every_epochs=None), "would never validate"),
        (lambda: make_validation(every_steps=0), "every_steps=0"),
        (lambda: make_validation(batch=0), "batch=0"),
        (lambda: make_validation(validate=3), "validate=3"),
        (lambda: make_validation(best="loss"), "best='loss'"),
        (lambda: make_validation(data=[]), "empty"),
        (lambda: make_best(metric=""), "metric=''"),
        (lambda: make_best(mode="least"), "mode='least'"),
        (lambda: make_best(min_delta=-1.0), "EarlyStopping.min_delta=-1.0"),
        (lambda: make_best(patience=-1), "patience=-1"),
        (lambda: make_options(clip_norm=0.0), "clip_norm=0.0"),
        (lambda: make_options(micro_batch=0), "micro_batch=0"),
        (lambda: make_options(nonfinite="ignore"), "nonfinite='ignore'"),
        (lambda: make_task(warm_up=-1), "warm_up=-1"),
        (lambda: make_options(seed="x"), "seed='x'"),
        (lambda: make_options(loader={}), "loader={}"),
    ],
)
def test_bad_settings_are_named(build: Any, named: str) -> None:
    with pytest.raises((ValueError, TypeError), match=named):
        build()


def make_validation(**fields: Any) -> Validation:
    return Validation(**{"data": Numbered(), **fields})


def make_best(**fields: Any) -> EarlyStopping:
    return EarlyStopping(**fields)


def make_options(**fields: Any) -> SessionOptions:
    return SessionOptions(**fields)


def _foreign_schedule() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD(make_model().parameters(), lr=0.1), step_size=1)


def _plateau() -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(make_model().parameters(), lr=0.1))


def test_a_metric_that_validate_does_not_return_is_named() -> None:
    model = first_model()
    validation = Validation(data=Numbered(), validate=scores_of(model), best=Best(metric="recall"))
    with pytest.raises(ValueError, match=r"'recall'.*'loss', 'accuracy'"):
        fit(make_task(model, epochs=1, validation=validation))


# -- real processes --------------------------------------------------------------------------------------------------


class Saying(Callback):
    workers = "all"

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_said = 0

    def on_step(self, info: StepInfo) -> None:
        self._num_said += 1
        if self._num_said <= 5:  # what is not read fills the pipe in the end
            say(("step", info.step, info.workers))

    def on_validation(self, scores: Mapping[str, Any], info: ValidationInfo) -> None:
        if info.is_best:
            say(("best", info.step, digest(self._model)))


def fit_in_a_run(folder: str, epochs: int, hurry: str, best: Best) -> dict[str, Any]:
    """Slow until there is a file of the name `hurry`. Each worker begins with other weights."""
    model = make_model()
    loss_fn = loss_of(model)

    def slow_loss(*batch: torch.Tensor) -> torch.Tensor:
        if not os.path.exists(hurry):
            time.sleep(0.05)
        return loss_fn(*batch)

    task = make_task(
        model,
        epochs=epochs,
        loss_fn=slow_loss,
        schedule=Rates(base_batch=8, scale="linear", warm_up=WarmUp(steps=5), schedule="cosine"),
        validation=Validation(data=Numbered(), validate=scores_of(model), best=best),
        checkpoints=Checkpoints(every_s=None),
        callbacks=[Saying(model), JsonLines(Path(folder) / "lines")],
    )
    fitted = fit(task)
    rate = task.optimizers[0].param_groups[0]["lr"]
    return {"fitted": fitted, "weights": digest(model), "rate": rate}


def check_alike(results: list[dict[str, Any]]) -> Fitted:
    assert not [result for result in results if isinstance(result, Died)], results
    assert all(result == results[0] for result in results)
    found: Fitted = results[0]["fitted"]
    return found


def told_to_main(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


def test_the_main_worker_is_killed_during_fit(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    with Rehearsal(fit_in_a_run, str(tmp_path), 2, str(hurry), Best(), workers=3, folder=tmp_path) as run:
        for number in range(3):
            run.wait_said(number, 3)
        ((main, _),) = [
            (number, worker)
            for number, worker in enumerate(run.workers)
            if any("lines" in os.readlink(link) for link in _links(worker.pid))
        ]
        run.kill(main)
        hurry.touch()
        results = run.finish()
    assert isinstance(results.pop(main), Died)
    fitted = check_alike(results)
    assert (fitted.reason, fitted.steps, len(fitted.history)) == ("finished", 2 * STEPS, 2)
    lines = told_to_main(tmp_path)
    assert [line["kind"] for line in lines].count("start") == 2
    assert lines[-1] == {"kind": "stop", "reason": "finished"}
    told = [line["step"] for line in lines if line["kind"] == "step"]
    assert abs(len(told) - 2 * STEPS) <= 1
    assert len(set(range(1, 2 * STEPS + 1)) - set(told)) <= 1


def _links(pid: int) -> list[str]:
    return [str(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink() and _is_there(link)]


def _is_there(link: Path) -> bool:
    try:
        os.readlink(link)
    except OSError:
        return False
    return True


def test_who_joins_gets_the_best_weights_and_stops_with_the_others(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    # The loss goes down, so that the first validation is the best, long before the newcomer is there.
    best = EarlyStopping(metric="loss", mode="max", patience=20)
    with Rehearsal(fit_in_a_run, str(tmp_path), 40, str(hurry), best, workers=2, folder=tmp_path) as run:
        run.wait_for(lambda: _best_said(run, 0))
        run.add()
        run.wait_said(2, 3)
        hurry.touch()
        results = run.finish()
        ((_, step, weights),) = _best_said(run, 0)
        assert not _best_said(run, 2)
        assert run.said(2)[0][2] == 3
    fitted = check_alike(results)
    assert (fitted.reason, fitted.steps) == ("early stopping", 22 * STEPS)
    assert fitted.best == fitted.validations[0]
    assert step == STEPS
    assert results[2]["weights"] == weights


def _best_said(run: Rehearsal, number: int) -> list[Any]:
    return [said for said in run.said(number) if said[0] == "best"]
