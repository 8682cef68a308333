"""Who is told what, and when: settled operations only, on the workers that a callback asks for."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from paceline.train.callbacks import (
    Callback,
    EpochInfo,
    JsonLines,
    PrintProgress,
    RunInfo,
    StepInfo,
    Teller,
    ValidationInfo,
)

RUN = RunInfo(epochs=2, steps_per_epoch=3, global_batch=8, samples=20, step=0, workers=1)


def step(number: int, loss: float = 0.5) -> StepInfo:
    return StepInfo(
        step=number, epoch=0, loss=loss, samples=8, rates=(0.1,), workers=1, seconds=0.25, skipped=math.isnan(loss)
    )


class Noting(Callback):
    def __init__(self, workers: Any = "main") -> None:
        self.workers = workers
        self.calls: list[tuple[str, Any]] = []

    def on_start(self, run: RunInfo) -> None:
        self.calls.append(("start", run.step))

    def on_step(self, info: StepInfo) -> None:
        self.calls.append(("step", info.step))

    def on_epoch_end(self, info: EpochInfo) -> None:
        self.calls.append(("epoch", info.epoch))

    def on_stop(self, reason: str) -> None:
        self.calls.append(("stop", reason))

    def on_error(self, error: BaseException) -> None:
        self.calls.append(("error", str(error)))


def do_step(teller: Teller, number: int) -> None:
    teller.completed()
    teller.tell("on_step", step(number), of=teller.operation)


def test_a_step_is_told_when_the_next_operation_is_complete() -> None:
    noting = Noting()
    teller = Teller([noting], lambda: True, lambda: RUN)
    teller.start()
    do_step(teller, 1)
    assert noting.calls == [("start", 0)]
    do_step(teller, 2)
    assert noting.calls[1:] == [("step", 1)]
    teller.stop("finished")
    assert noting.calls[2:] == [("step", 2), ("stop", "finished")]


def test_an_epoch_waits_for_its_last_step() -> None:
    noting = Noting()
    teller = Teller([noting], lambda: True, lambda: RUN)
    do_step(teller, 1)
    teller.tell("on_epoch_end", EpochInfo(epoch=0, step=1, loss=0.5, scores={}), of=teller.operation)
    assert noting.calls == []
    do_step(teller, 2)
    assert noting.calls == [("start", 0), ("step", 1), ("epoch", 0)]


def test_only_the_main_worker_is_told_unless_asked_for() -> None:
    on_main, on_all = Noting(), Noting("all")
    teller = Teller([on_main, on_all], lambda: False, lambda: RUN)
    teller.start()
    do_step(teller, 1)
    teller.stop("finished")
    assert on_main.calls == []
    assert on_all.calls == [("start", 0), ("step", 1), ("stop", "finished")]


def test_who_becomes_main_is_told_of_the_start_first() -> None:
    main = [False]
    noting = Noting()
    teller = Teller([noting], lambda: main[0], lambda: RUN)
    teller.start()
    do_step(teller, 1)
    main[0] = True
    do_step(teller, 2)
    assert noting.calls == [("start", 0), ("step", 1)]
    main[0] = False
    do_step(teller, 3)
    teller.stop("left")
    assert noting.calls[2:] == [("stop", "left")], "the end is told wherever the start was"


def test_an_error_is_told_to_all_even_if_one_of_them_fails() -> None:
    class Failing(Noting):
        def on_error(self, error: BaseException) -> None:
            raise OSError("no disk")

    noting = Noting()
    teller = Teller([Failing(), noting], lambda: True, lambda: RUN)
    teller.start()
    error = ValueError("bad")
    teller.fail(error)
    assert noting.calls[-1] == ("error", "bad")
    assert error.__notes__ == ["Failing.on_error raised OSError: no disk"]


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    for _ in range(2):  # a second training appends
        lines = JsonLines(path)
        lines.on_start(RUN)
        lines.on_step(step(1, math.nan))
        lines.on_validation({}, ValidationInfo(epoch=0, step=1, scores={"loss": 0.25}, is_best=True))
        lines.on_epoch_end(EpochInfo(epoch=0, step=1, loss=0.5, scores={}))
        lines.on_stop("finished")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(found) == 10
    assert [line["kind"] for line in found[:5]] == ["start", "step", "validation", "epoch", "stop"]
    assert (found[1]["loss"], found[1]["skipped"], found[1]["rates"]) == (None, True, [0.1])
    assert (found[2]["scores"], found[4]["reason"]) == ({"loss": 0.25}, "finished")


def test_json_lines_are_closed_after_an_error(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "run.jsonl")
    lines.on_start(RUN)
    lines.on_error(ValueError("bad"))
    assert json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])["error"] == "ValueError: bad"


def test_print_progress() -> None:
    out = io.StringIO()
    progress = PrintProgress(every_steps=2, file=out)
    progress.on_start(RUN)
    progress.on_step(step(1))
    progress.on_step(step(2))
    progress.on_validation({}, ValidationInfo(epoch=0, step=2, scores={"loss": 0.25}, is_best=True))
    progress.on_epoch_end(EpochInfo(epoch=0, step=2, loss=0.5, scores={}))
    progress.on_stop("finished")
    assert out.getvalue().splitlines() == [
        "training: 2 epochs of 3 steps, 8 samples a step, 1 worker",
        "epoch 1/2 step 2: loss 0.5, rate 0.1, 32 samples/s, 1 worker",
        "epoch 1/2 step 2: validation: loss 0.25 (best)",
        "epoch 1/2 done: loss 0.5",
        "training ended: finished",
    ]


def test_print_progress_refuses_a_bad_setting() -> None:
    with pytest.raises(ValueError, match="every_steps=0"):
        PrintProgress(every_steps=0)
