"""Whether every sample was committed once: against a count by hand, over random histories and faults."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.journal.reader import StepRecord
from paceline.watch.audit import Audit, SampleSpan, audit, history_of
from tests.watch.samples import step

QUICK = settings(deadline=None, max_examples=60)  # a busy machine is no fault of the code
LENGTHS, BATCHES = st.integers(1, 200), st.integers(1, 40)


def faultless(length: int, batch: int, num_epochs: int) -> list[StepRecord]:
    positions = [(epoch, start) for epoch in range(num_epochs) for start in range(0, length, batch)]
    return [
        step(number, start, min(batch, length - start), epoch=epoch)
        for number, (epoch, start) in enumerate(positions, start=1)
    ]


def positions_in(spans: tuple[SampleSpan, ...]) -> set[int]:
    return {position for span in spans for position in range(span.start, span.stop)}


@QUICK
@given(LENGTHS, BATCHES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_run_without_a_fault_is_exact_in_any_order_of_rows(
    length: int, batch: int, num_epochs: int, chance: random.Random
) -> None:
    rows = faultless(length, batch, num_epochs)
    chance.shuffle(rows)
    result = audit(rows, length, batch)
    assert result.is_exact
    assert result.details == ()
    assert result.num_samples == length * num_epochs
    assert all(epoch.num_samples == length and not epoch.is_unfinished for epoch in result.epochs)


@QUICK
@given(LENGTHS, BATCHES, st.data())
def test_any_rows_are_counted_as_by_hand(length: int, batch: int, data: st.DataObject) -> None:
    chosen = data.draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, length + 5), st.integers(0, 30)), max_size=12)
    )
    rows = [step(number, start, count, epoch=epoch) for number, (epoch, start, count) in enumerate(chosen)]
    result = audit(rows, length, batch)
    done = Counter((row.epoch, position) for row in rows for position in range(row.position, row.position + row.count))
    for epoch in result.epochs:
        mine = {position: times for (number, position), times in done.items() if number == epoch.epoch}
        inside = {position for position in mine if position < length}
        end = max(inside, default=-1) + 1 if epoch is result.epochs[-1] else length
        assert epoch.num_samples == len(inside)
        assert positions_in(epoch.twice) == {position for position, times in mine.items() if times > 1}
        assert positions_in(epoch.outside) == {position for position in mine if position >= length}
        assert positions_in(epoch.missing) == set(range(end)) - inside
        for spans in (epoch.missing, epoch.twice, epoch.outside):
            assert all(first.stop < second.start for first, second in itertools.pairwise(spans)), "merged"


@QUICK
@given(st.integers(2, 200), BATCHES, st.data())
def test_a_lost_step_and_a_step_done_twice_are_both_found(length: int, batch: int, data: st.DataObject) -> None:
    rows = faultless(length, batch, 2)
    victim = data.draw(st.sampled_from(rows[:-1]))  # of the last one nobody can know that it should be there
    span = SampleSpan(victim.position, victim.position + victim.count)
    without = audit([row for row in rows if row is not victim], length, batch)
    assert not without.is_exact
    assert positions_in(tuple(s for e in without.epochs for s in e.missing)) == positions_in((span,))
    copy = step(rows[-1].operation + 1, victim.position, victim.count, epoch=victim.epoch)
    assert [epoch.twice for epoch in audit([*rows, copy], length, batch).epochs if epoch.twice] == [(span,)]


@QUICK
@given(LENGTHS, BATCHES, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4))
def test_rollbacks_repeat_steps_and_never_samples(length: int, batch: int, falls: list[tuple[int, int]]) -> None:
    """Founded again and again, each time from an operation that was reached, as the journal would keep it."""
    truth = faultless(length, batch, 3)
    kept: dict[int, StepRecord] = {}
    reached = 0
    for founding, (back, forward) in enumerate([(0, 30), *falls], start=1):
        base = max(0, reached - back)
        reached = min(len(truth), base + forward)
        for row in truth[base:reached]:
            times = kept[row.operation].times_done + 1 if row.operation in kept else 1
            kept[row.operation] = step(
                row.operation, row.position, row.count, epoch=row.epoch, founding=founding, times=times
            )
        if reached == base:
            return  # which rows are obsolete cannot be told from rows where the newest founding has none
    result = audit(kept.values(), length, batch)
    assert result.is_exact
    assert [row.operation for row in history_of(kept.values())] == list(range(1, reached + 1))
    assert result.num_repeated_steps == sum(kept[operation].times_done > 1 for operation in range(1, reached + 1))


def summary_of(result: Audit) -> list[str]:
    return list(result.summary)


def test_the_summary_says_it_in_a_line() -> None:
    assert summary_of(audit(faultless(1797, 64, 1), 1797, 64)) == ["epoch 0: 1,797 samples, each once"]
    assert summary_of(audit(faultless(10, 4, 5), 10, 4)) == ["epochs 0 to 4: 10 samples in each epoch, each once"]
    assert summary_of(audit(faultless(10, 4, 3)[:-1], 10, 4)) == [
        "epochs 0 to 1: 10 samples in each epoch, each once",
        "epoch 2: 8 of 10 samples, each once so far",
    ]
    assert summary_of(audit([], 10, 4)) == []


def test_a_rollback_is_said_and_is_no_fault() -> None:
    rows = [step(1, 0, 4), step(2, 4, 4, founding=2, times=2), step(3, 8, 2, founding=2)]
    result = audit(rows, 10, 4)
    assert result.is_exact
    assert summary_of(result) == ["epoch 0: 10 samples, each once (1 step done again after a rollback)"]


def test_rows_above_a_newer_founding_are_obsolete() -> None:
    rows = [step(1, 0, 4), step(2, 4, 4, founding=2, times=2), step(3, 8, 2), step(4, 0, 4, epoch=1)]
    assert summary_of(audit(rows, 10, 4)) == [
        "epoch 0: 8 of 10 samples, each once so far (1 step done again after a rollback)"
    ]


def test_faults_are_named_with_their_ranges() -> None:
    rows = [step(1, 0, 4), step(2, 2, 4), step(5, 8, 4), step(6, 0, 4, epoch=1)]
    result = audit(rows, 10, 4)
    assert summary_of(result)[0] == ("epoch 0: 8 of 10 samples, 2 missing, 2 done twice, 2 outside of the dataset")
    details = "\n".join(result.details)
    assert "missing are positions 6 to 7 of" in details
    assert "twice are positions 2 to 3 of" in details
    assert "outside are positions 10 to 11 of" in details
    assert "operations 3 to 4 beside what is missing have no record" in details
    assert "the batches of operations 2, 5 are not the global batch" in details


def test_an_epoch_that_was_passed_over_is_missing() -> None:
    result = audit([*faultless(10, 10, 1), step(3, 0, 10, epoch=2)], 10, 10)
    assert summary_of(result)[1] == "epoch 1: 0 of 10 samples, 10 missing"
    assert result.epochs[1].unrecorded == (SampleSpan(2, 3),)


def test_what_came_before_the_beginning_is_not_missing() -> None:
    rows = faultless(10, 4, 3)[4:]
    result = audit(rows, 10, 4, begins_at=(1, 4))
    assert result.is_exact
    assert summary_of(result)[0] == "epoch 1: 6 of 10 samples, each once, from position 4 on"
    assert audit(rows, 10, 4).epochs[0].missing == (SampleSpan(0, 10),)
    assert audit(rows, 10, 4).epochs[0].unrecorded == (SampleSpan(1, 5),)


@pytest.mark.parametrize(("length", "batch"), [(0, 4), (10, 0)])
def test_wrong_figures_are_refused_by_name(length: int, batch: int) -> None:
    with pytest.raises(ValueError, match=f"dataset_length={length}, global_batch={batch}"):
        audit([], length, batch)
