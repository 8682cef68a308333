"""Messages that cross each other, their senders' ends and the end of the group: none overtakes another, none is
lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.collective import Group, Handle
from paceline.errors import DeadlineExceeded, GroupAborted, GroupError, PeerLost
from paceline.testing.crew import Crew
from paceline.wire.deadline import Deadline


def ask_between_two(group: Group) -> float:
    """The receive comes when the first message was put aside, and the second one is about to be read."""
    if group.rank == 1:
        group.send(torch.full((1,), 1.0), 0, tag=5)
        group.send(torch.zeros(1), 0, tag=8)
        group.barrier()
        group.send(torch.full((1,), 2.0), 0, tag=5)
        group.send(torch.zeros(1), 0, tag=9)
        group.barrier()
        return 1.0
    rare = group.recv(torch.zeros(1), 1, tag=9, async_op=True)
    group.recv(torch.zeros(1), 1, tag=8)
    tensor = torch.zeros(1)
    mailbox = group._parts.mailbox
    read_one = mailbox.read_one
    asked: list[Handle] = []

    def ask_and_read(*arguments: Any) -> None:
        if not asked:
            asked.append(group.recv(tensor, 1, tag=5, async_op=True))
        read_one(*arguments)

    mailbox.read_one = ask_and_read  # type: ignore[method-assign, assignment]
    group.barrier()
    rare.wait(10.0)
    mailbox.read_one = read_one  # type: ignore[method-assign]
    asked[0].wait(10.0)
    group.recv(torch.zeros(1), 1, tag=5)
    group.barrier()
    return float(tensor)


def test_a_message_does_not_overtake_one_that_was_put_aside() -> None:
    with Crew(2) as crew:
        assert crew.run(ask_between_two) == [1.0, 1.0]


def send_and_leave(group: Group) -> list[float]:
    """Rank 1 is gone before rank 0 asks for the first time; rank 2 answers only then."""
    tensor = torch.zeros(1)
    found: list[float] = []
    if group.rank == 1:
        group.send(torch.full((1,), 1.0), 0)
        group.send(torch.full((1,), 2.0), 0, tag=1)
        group.send(torch.full((1,), 3.0), 2)
        group.close()
        return found
    health = group._health
    deadline = Deadline(10.0, "the goodbye")
    while not health.has_departed(1):
        health.wait_any([], deadline, "rank 1 to leave")
    group.recv(tensor, 1)
    found.append(float(tensor))
    if group.rank == 0:
        group.recv(tensor, None, tag=1)
        found.append(float(tensor))
        later = group.recv(tensor, None, tag=2, async_op=True)
        group.send(torch.zeros(1), 2)
        later.wait(10.0)
        assert later.source == 2
        with pytest.raises(PeerLost):
            group.recv(tensor, 1)
    else:
        group.recv(tensor, 0)
        group.send(torch.full((1,), 4.0), 0, tag=2)
    return found


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_messages_outlive_the_membership_of_their_sender(layout: str) -> None:
    with Crew(3, hosts=layout) as crew:
        assert crew.run(send_and_leave) == [[1.0, 2.0], [], [3.0]]


def post_into_the_close(group: Group) -> None:
    """The group closes when the receive is in the list, and nobody reads any more."""
    group.barrier()
    reception = group._messages._reception
    call_thread = reception._call_thread

    def close_first() -> None:
        group.close()
        call_thread()

    reception._call_thread = close_first  # type: ignore[method-assign]
    pending = group.recv(torch.zeros(1), 1 - group.rank, async_op=True)
    with pytest.raises(GroupError):
        pending.wait(5.0)
    group.close()


def test_a_receive_posted_while_the_group_closes_is_told() -> None:
    with Crew(2) as crew:
        crew.run(post_into_the_close)


def wait_for_the_rare(group: Group) -> None:
    """A receive that nobody waits for may stand for longer than an operation may take."""
    group.set_timeout(0.3)
    if group.rank == 1:
        group.barrier(timeout_s=10.0)
        group.send(torch.ones(1), 0, tag=7)
        with pytest.raises(GroupAborted, match="recv from"):
            group.recv(torch.zeros(1), 0, timeout_s=10.0)
        return
    rare, never = (group.recv(torch.zeros(1), 1, tag=tag, async_op=True) for tag in (7, 8))
    with pytest.raises(DeadlineExceeded, match=r"not complete after 0\.7 s"):
        rare.wait(0.7)
    group.barrier(timeout_s=10.0)
    rare.wait()
    with pytest.raises(DeadlineExceeded, match=r"waited 0.3 s for a message of .*\(rank 1\)"):
        never.wait()


def test_the_time_of_a_receive_begins_when_somebody_waits_for_it() -> None:
    with Crew(2) as crew:
        crew.run(wait_for_the_rare)
