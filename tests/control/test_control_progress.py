"""Rows on their way to the database."""

from __future__ import annotations

from paceline.control.messages.progress import (
    MAX_ROWS,
    MAX_SENT,
    MetricRow,
    ProgressKeeper,
    Recorded,
    StepRow,
    WorkerRow,
)


def step(operation: int, generation: int = 1) -> StepRow:
    return StepRow(operation, generation, 0, 0, 1, 0.0, 0.0)


def keeper_with(*operations: int) -> ProgressKeeper:
    keeper = ProgressKeeper("m")
    for operation in operations:
        keeper.add(step(operation))
    return keeper


def test_only_main_sends_rows_and_everybody_how_it_does() -> None:
    worker = WorkerRow(1, 8, 100.0, 0.08, 3)
    for is_main in (False, True):
        keeper = keeper_with(1, 2)
        keeper.describe(worker)
        progress = keeper.take(is_main)
        assert progress is not None
        assert [row.operation for row in progress.steps] == ([1, 2] if is_main else [])
        assert progress.worker == worker


def test_rows_are_kept_until_they_are_recorded() -> None:
    keeper = keeper_with(1, 2, 3)
    first = keeper.take(True)
    assert first is not None
    assert keeper.take(True) is None  # one at a time
    keeper.reconnected()
    again = keeper.take(True)
    assert again is not None
    assert again.steps == first.steps
    keeper.recorded(Recorded(first.number, 1, 3))  # of the lost connection
    assert keeper.num_unrecorded() == 3
    keeper.recorded(Recorded(again.number, 1, 2))
    rest = keeper.take(True)
    assert rest is not None
    assert [row.operation for row in rest.steps] == [3]


def test_who_becomes_main_sends_what_is_missing() -> None:
    keeper = keeper_with(1, 2, 3)
    keeper.add_metric(MetricRow(2, "a", 1.0))
    keeper.add_metric(MetricRow(3, "a", 1.0))
    taken = keeper.take(False)
    assert taken is not None
    keeper.recorded(Recorded(taken.number, 1, 2, 2))
    as_main = keeper.take(True)
    assert as_main is not None
    assert [row.operation for row in as_main.steps] == [3]
    assert [row.operation for row in as_main.metrics] == [3]


def test_main_may_add_a_metric_to_an_operation_that_is_recorded() -> None:
    keeper = keeper_with()
    keeper.add_metric(MetricRow(5, "a", 1.0))
    first = keeper.take(True)
    assert first is not None
    keeper.add_metric(MetricRow(5, "b", 2.0))
    keeper.recorded(Recorded(first.number, 1, 5, 5))
    second = keeper.take(True)
    assert second is not None
    assert [row.name for row in second.metrics] == ["b"]


def test_rows_of_an_earlier_founding_are_obsolete() -> None:
    keeper = keeper_with(7, 8)
    keeper.add(step(6, generation=4))
    taken = keeper.take(True)
    assert taken is not None
    keeper.recorded(Recorded(taken.number, 4, 5))
    assert [row.generation for row in (keeper.take(True) or taken).steps] == [4]


def test_what_is_kept_and_sent_is_bounded() -> None:
    keeper = keeper_with(*range(MAX_ROWS + 10))
    taken = keeper.take(True)
    assert taken is not None
    assert len(taken.steps) == MAX_SENT
    assert taken.steps[0].operation == 10
    assert keeper.num_unrecorded() == MAX_ROWS


def test_who_comes_inherits_what_is_not_recorded_and_sends_it_when_it_is_main() -> None:
    donor, newcomer = keeper_with(1, 2, 3, 4), ProgressKeeper("n")
    donor.add_metric(MetricRow(4, "a", 1.0))
    said = donor.take(True)
    assert said is not None
    donor.recorded(Recorded(said.number, 1, 2))
    newcomer.inherit(donor.unrecorded())
    newcomer.inherit(donor.unrecorded())  # once more is no more
    newcomer.add(step(5))
    taken = newcomer.take(True)
    assert taken is not None
    assert [row.operation for row in taken.steps] == [3, 4, 5]
    newcomer.recorded(Recorded(taken.number, 1, 5))
    assert newcomer.num_unrecorded() == 0


def test_who_inherits_drops_what_main_records() -> None:
    donor, newcomer = keeper_with(1, 2, 3), ProgressKeeper("n")
    newcomer.inherit(donor.unrecorded())
    taken = newcomer.take(False)
    assert taken is not None
    assert not taken.steps
    newcomer.recorded(Recorded(taken.number, 1, 2))
    assert [row.operation for row in newcomer.unrecorded().steps] == [3]


def test_what_a_checkpoint_has_is_kept_until_it_is_sent() -> None:
    """The founding began after it, so that by its number it seems to be recorded."""
    keeper = ProgressKeeper("m")
    early = keeper.take(False)
    assert early is not None
    keeper.restore([step(3), step(4)])
    keeper.recorded(Recorded(early.number, 2, 4))
    keeper.add(step(5, generation=2))
    newcomer = ProgressKeeper("n")
    newcomer.inherit(keeper.unrecorded())
    for one in (keeper, newcomer):
        taken = one.take(True)
        assert taken is not None
        assert [row.operation for row in taken.steps] == [3, 4, 5]
        one.recorded(Recorded(taken.number, 2, 5))
        assert one.num_unrecorded() == 0


def test_where_there_is_no_database_nothing_is_kept() -> None:
    keeper = ProgressKeeper("m", is_kept=False)
    keeper.add(step(1))
    keeper.add_metric(MetricRow(1, "a", 1.0))
    assert keeper.num_unrecorded() == 0


def test_a_remark_does_not_wait_for_the_answer_to_what_was_sent_before() -> None:
    """Where the disk is full no answer comes."""
    keeper = keeper_with(1)
    first = keeper.take(True)
    keeper.log("not saved", "the last state")
    second = keeper.take(True)
    assert first is not None
    assert second is not None
    assert second.steps == first.steps
    assert [remark.text for remark in second.lines] == ["the last state"]
    assert keeper.take(True) is None
    keeper.recorded(Recorded(first.number, 1, 1))  # the second one has all of it, and is answered too
    assert keeper.has_lines()
    keeper.recorded(Recorded(second.number, 1, 1))
    assert not keeper.has_lines()
    assert not keeper.num_unrecorded()
