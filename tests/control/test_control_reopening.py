"""What a coordinator remembers of a run that goes on."""

from __future__ import annotations

import msgspec
import pytest

from paceline.control.machines.coordinator_events import CoordinatorState
from paceline.control.machines.reopening import reopened


@pytest.mark.parametrize(("over", "reached"), [("ended", 422), ("failed", 423), ("", 423)])
def test_the_end_of_a_run_is_no_operation_that_is_done_again(over: str, reached: int) -> None:
    """After a stop in order the log said that an operation is done again, which was the stop itself."""
    standing = CoordinatorState(term=2, newest=5, founded=1, reached=300, over=over, halting="somebody asked for it")
    changes = reopened({"standing": msgspec.msgpack.encode(standing)}, applied=423)
    again = msgspec.msgpack.decode(changes["standing"], type=CoordinatorState)
    assert (again.reached, again.over, again.halting, again.fence) == (reached, "", "", 6)
