"""A deadline is a positive, finite number of seconds and names what was waited for."""

from __future__ import annotations

import math
import os

import pytest

from paceline.errors import DeadlineExceeded
from paceline.wire.deadline import MAX_SECONDS, Deadline
from paceline.wire.descriptors import eventfd
from paceline.wire.waiting import PLAIN, READ, is_ready


@pytest.mark.parametrize("seconds", [0, -1, -0.0, math.nan, math.inf, -math.inf, MAX_SECONDS * 2])
def test_seconds_that_cannot_be_waited_are_refused_with_the_operation_and_a_remedy(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"all_reduce.*give a number of seconds > 0"):
        Deadline(seconds, "all_reduce")


def test_the_longest_deadline_can_be_waited_with() -> None:
    signal = eventfd()
    os.eventfd_write(signal.fileno(), 1)
    PLAIN.wait_any([(signal.fileno(), READ)], Deadline(MAX_SECONDS, "a long wait"), "a signal")
    signal.close()


def test_a_wait_that_passes_its_deadline_names_the_operation_and_what_it_waited_for() -> None:
    signal = eventfd()
    deadline = Deadline(0.01, "forming group g")
    with pytest.raises(DeadlineExceeded, match=r"forming group g: waited 0.01 s for rank 3") as caught:
        PLAIN.wait_any([(signal.fileno(), READ)], deadline, "rank 3")
    assert isinstance(caught.value, TimeoutError)
    assert deadline.expired()
    assert deadline.remaining_s() == 0.0
    with pytest.raises(DeadlineExceeded, match="rank 4"):
        deadline.check("rank 4")
    signal.close()


def test_a_deadline_that_is_not_over_lets_pass() -> None:
    deadline = Deadline(1000, "patience")
    deadline.check("anything")
    assert not deadline.expired()
    assert 900 < deadline.remaining_s() <= 1000
    assert 900_000 < deadline.remaining_ms() <= 1_000_001


def test_a_closed_descriptor_is_not_ready() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")
    assert is_ready(reader, READ)
    os.close(reader)
    assert not is_ready(reader, READ)
    os.close(writer)
