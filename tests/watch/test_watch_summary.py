"""The last lines of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.control.journal.reader import RunReader, StepRecord
from paceline.control.messages.plan import PlanStart
from paceline.watch.summary import find_outages, summarise
from tests.watch.samples import EPOCH, START, a_whole_run, event_row, plan_row, step, writing


def lines_of(folder: Path) -> list[str]:
    with RunReader(folder) as reader:
        return summarise(reader)


def test_a_run_that_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(tmp_path, monkeypatch) as writer:
        a_whole_run(writer)
        writer.say("ended", "all members reached the end", ended=str(START + 75))
        (tmp_path / "checkpoints" / "step-000000008-op-8").mkdir(parents=True)
        (tmp_path / "logs").mkdir()
        lines = lines_of(tmp_path)
    assert lines[0] == "run digits: ended after 1:15: all members reached the end"
    assert lines[1] == "trained: 2 epochs, 8 steps, 200 samples; the last loss is 0.0625"
    assert lines[2] == "metrics: accuracy 0.875"
    assert lines[3] == "members: 2 members took part, 1 lost"
    assert lines[4] == "  bbbbbbbb on lab-1: dead, process 2 was killed by signal 9"
    assert lines[5] == "outages: 1, 3.0 s in all"
    assert "3.0 s without a step (died bbbbbbbb: process 2 was killed by signal 9)" in lines[6]
    assert lines[7] == "samples: epochs 0 to 1: 100 samples in each epoch, each once"
    assert lines[8] == f"checkpoints: {tmp_path / 'checkpoints'} (1, the newest is step-000000008-op-8)"
    assert lines[9:] == [f"logs: {tmp_path / 'logs'}"]


def test_the_root_cause_of_a_failure_comes_last(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        writer.say("failed", "Traceback\n  File train.py\nValueError: \x1b[31mno data\n", ended=str(START + 60))
        lines = lines_of(tmp_path)
    assert lines[-3:] == ["failed: Traceback", "  File train.py", "ValueError: [31mno data"]


def test_a_run_that_never_made_a_step(tmp_path: Path) -> None:
    with writing(tmp_path):
        lines = lines_of(tmp_path)
    assert lines == [
        f"run {tmp_path.name}: not started",
        "trained: nothing; no step was done",
        "members: none came",
    ]


def test_an_interrupted_epoch_and_unknown_figures(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.say("interrupted")
        writer.steps(0, EPOCH[:2])
        lines = lines_of(tmp_path)
        assert "trained: 1 epoch (the last one in part), 2 steps, 64 samples" in lines[1]
        assert lines[-1] == "samples: epoch 0: 64 of 100 samples, each once so far"
        writer.journal.record(run={"fact/global_batch": ""})
        assert "not audited" in lines_of(tmp_path)[-1]


def test_a_run_that_goes_on_from_another_folder_does_not_miss_what_was_done_there(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.plan("aaaaaaaaaaaaaaaa", start=PlanStart.FOUND, base=5)
        writer.say("ended")
        writer.steps(1, EPOCH[1:])
        lines = lines_of(tmp_path)
    assert lines[-1] == "samples: epoch 1: 68 of 100 samples, each once, from position 32 on"


def test_a_sample_that_was_lost_is_told(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.say("ended")
        writer.steps(0, (EPOCH[0], *EPOCH[2:]))
        lines = lines_of(tmp_path)
    assert "samples: epoch 0: 68 of 100 samples, 32 missing" in lines
    assert "  epoch 0: missing are positions 32 to 63 of its order" in lines


def at(operation: int, time: float, generation: int) -> StepRecord:
    row = step(operation, 0, 1)
    return StepRecord(operation, START + time, generation, 0, 0, 1, row.loss, 1.0, 1, 1)


def test_an_outage_is_the_time_between_steps_around_a_loss() -> None:
    plans = [
        plan_row(1, PlanStart.FOUND, 0, 0),
        plan_row(2, PlanStart.RECOVER, 11, 2),
        plan_row(3, PlanStart.SWITCH, 20),
    ]
    steps = [at(1, 8, 1), at(2, 9, 1), at(3, 12.5, 2), at(4, 30, 3)]
    (outage,) = find_outages(steps, plans, [event_row("dead", 10), event_row("joined", 19)])
    assert (outage.since, outage.until) == (START + 9, START + 12.5)
    assert [event.kind for event in outage.causes] == ["dead"]
    assert "3.5 s without a step" in str(outage)


def test_a_row_that_the_next_main_worker_recorded_does_not_shorten_it() -> None:
    plans = [plan_row(1, PlanStart.FOUND, 0, 0), plan_row(2, PlanStart.RECOVER, 11, 2)]
    steps = [at(1, 8, 1), at(2, 12.4, 1), at(3, 12.5, 2)]
    (outage,) = find_outages(steps, plans, [event_row("evicted", 10)])
    assert (outage.since, outage.until) == (START + 10, START + 12.5)


def test_two_losses_before_a_step_are_one_outage_with_both_causes() -> None:
    plans = [
        plan_row(1, PlanStart.FOUND, 0, 0),
        plan_row(2, PlanStart.RECOVER, 11, 2),
        plan_row(3, PlanStart.RECOVER, 14, 2),
    ]
    steps = [at(1, 8, 1), at(2, 9, 1), at(3, 16, 3)]
    (outage,) = find_outages(steps, plans, [event_row("dead", 10), event_row("dead", 13)])
    assert (outage.since, outage.until, len(outage.causes)) == (START + 9, START + 16, 2)


def test_a_founding_from_a_checkpoint_and_an_outage_without_an_end() -> None:
    plans = [plan_row(1, PlanStart.FOUND, 0, 0), plan_row(2, PlanStart.FOUND, 20, 1)]
    steps = [at(1, 5, 1)]
    (outage,) = find_outages(steps, plans, [event_row("dead", 10)])
    assert (outage.since, outage.until, outage.founded_from) == (START + 10, 0.0, 1)
    assert "no step since, founded again from operation 1" in str(outage)


def test_what_came_before_any_step_is_no_outage() -> None:
    plans = [plan_row(1, PlanStart.FOUND, 0, 0), plan_row(2, PlanStart.FOUND, 5, 0)]
    assert find_outages([at(1, 8, 2)], plans, [event_row("dead", 3)]) == []
    assert find_outages([], plans, [event_row("dead", 3)]) == []
