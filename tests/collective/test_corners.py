"""Corners that were once wrong: each test brings its bug back when the repair is taken away."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

from paceline.collective import Group, Handle
from paceline.collective.memory_channel import ChannelMessage, MemoryChannel
from paceline.errors import (
    DeadlineExceeded,
    GroupAborted,
    GroupClosed,
    GroupError,
    PacelineError,
    PeerLost,
    ProtocolError,
)
from paceline.testing.crew import Crew, say
from paceline.testing.eventually import eventually
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.frame import TensorSpec
from paceline.wire.memory import Arena, SharedMemory
from paceline.wire.waiting import READ, is_ready


def use_after_close(group: Group) -> None:
    group.barrier()
    group.close()
    for asynchronous in (True, False, True):
        with pytest.raises(GroupClosed):
            group.all_reduce(torch.ones(3), async_op=asynchronous).wait(5.0)
        with pytest.raises(GroupClosed):
            group.send(torch.ones(3), 1 - group.rank, async_op=asynchronous).wait(5.0)


def test_operations_after_close_raise_at_once() -> None:
    with Crew(2) as crew:
        crew.run(use_after_close)


def regroup_twice(group: Group) -> float:
    """Two groups over the same ranks live side by side; the end of one is not that of the other."""
    first, second = group.regroup([0, 1, 2]), group.regroup([0, 1, 2])
    assert first.name != second.name
    first.close()
    group.close()
    total = torch.ones(3)
    second.all_reduce(total)
    if second.rank == 0:
        second.send(total, 1)
    elif second.rank == 1:
        second.recv(total, 0)
    second.barrier()
    second.close()
    return float(total[0])


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_two_groups_of_the_same_members_do_not_share_anything(layout: str) -> None:
    with Crew(3, hosts=layout) as crew:
        assert crew.run(regroup_twice) == [3.0] * 3


def meet(group: Group) -> None:
    group.barrier()


def leave(group: Group) -> None:
    group.close()


def regroup_in_vain(group: Group) -> None:
    with pytest.raises(PacelineError):
        group.regroup([0, 1, 2], forming_s=0.5)


def regroup_all(group: Group) -> None:
    with group.regroup([0, 1, 2], forming_s=20) as following:
        following.barrier()


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_a_failed_try_to_regroup_does_not_spoil_the_next(layout: str) -> None:
    """Rank 0 comes when the others have given up once."""
    with Crew(3, hosts=layout) as crew:
        crew.run(meet)
        crew.run(regroup_in_vain, ranks=[1, 2])
        crew.run(regroup_all)


def regroup_before_the_other_gave_up(group: Group) -> None:
    """Both fail at the same time, but rank 0 is slow to let go of its failed try: the next visit of rank 1 comes while
    it still has that."""
    endpoint = group._parts.endpoint
    if group.rank == 0:
        close_room = endpoint.close_room

        def close_late(room: str, **options: bool) -> None:
            eventually(lambda: any(purpose.startswith(room) for purpose in endpoint._parked), "the next visit")
            close_room(room, **options)

        endpoint.close_room = close_late  # type: ignore[method-assign]
    with pytest.raises(PacelineError):
        group.regroup([0, 1, 2], forming_s=1)
    if group.rank == 0:
        endpoint.close_room = close_room  # type: ignore[method-assign]
    say("tried")
    regroup_all(group)


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_who_tries_again_before_the_other_gave_up_is_not_sent_away(layout: str) -> None:
    with Crew(3, hosts=layout) as crew:
        crew.run(meet)
        crew.start(regroup_before_the_other_gave_up, ranks=[0, 1])
        crew.hear(0)
        crew.hear(1)
        crew.start(regroup_all, ranks=[2])
        crew.finish()


def first_message(group: Group, send: bool, then_meet: bool) -> Any:
    try:
        if send:
            group.send(torch.ones(3), 1)
        else:
            group.recv(torch.ones(3), 1)
        if then_meet:
            group.barrier()
    except PeerLost as error:
        return error.rank
    return None


@pytest.mark.parametrize("send", [True, False])
@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_the_first_message_to_a_dead_member_is_its_loss(layout: str, send: bool) -> None:
    with Crew(2, hosts=layout) as crew:
        crew.run(meet)
        crew.bury(1)
        crew.start(first_message, send, True, ranks=[0])
        assert crew.finish([0], timeout_s=10) == [1]


def large_message_to_the_dead(group: Group, in_arena: bool) -> Any:
    tensor = group.empty((1 << 24,)) if in_arena else torch.empty(1 << 24)
    group.barrier()
    say("ready")
    if group.rank == 1:
        time.sleep(60)
    try:
        group.send(tensor, 1)
    except PeerLost as error:
        return error.rank
    return None


@pytest.mark.parametrize("in_arena", [True, False])
def test_who_dies_in_the_middle_of_a_large_message_is_lost(in_arena: bool) -> None:
    """It has read nothing: the sender waits for its first signal, or for a bin to be emptied."""
    with Crew(2) as crew:
        crew.start(large_message_to_the_dead, in_arena)
        crew.hear(0)
        crew.hear(1)
        crew.wait_blocked(0)
        crew.kill(1)
        assert crew.finish([0], timeout_s=10) == [1]


def test_a_message_that_lies_where_there_is_no_memory_is_refused() -> None:
    memory = SharedMemory.create(1 << 22)
    ours, theirs = (Connection(one, peer="the other") for one in socket.socketpair())
    with contextlib.closing(memory), contextlib.closing(ours), contextlib.closing(theirs):
        conveyor = MemoryChannel(Arena(memory, 0), {1: memory})
        for rank, offset in ((1, -1), (1, 1 << 40), (1, (1 << 22) - 3), (2, 0)):
            carried = ChannelMessage(0, TensorSpec("uint8", (4,)), offset, True)
            with pytest.raises(ProtocolError, match="has no memory"):
                conveyor.receive(ours, carried, torch.zeros(4, dtype=torch.uint8), rank, Deadline(5.0, "a test"))


@pytest.mark.parametrize("send", [True, False])
@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_the_first_message_to_a_member_that_left_is_its_loss(layout: str, send: bool) -> None:
    with Crew(2, hosts=layout) as crew:
        crew.run(meet)
        crew.run(leave, ranks=[1])
        assert crew.run(first_message, send, False, ranks=[0]) == [1]


def regroup_with_the_dead(group: Group) -> Any:
    try:
        group.regroup(list(range(group.size)), forming_s=60).close()
    except (PeerLost, GroupAborted) as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_a_death_before_a_regroup_ends_it_at_once(layout: str, victim: int) -> None:
    others = [rank for rank in range(3) if rank != victim]
    with Crew(3, hosts=layout) as crew:
        crew.run(meet)
        crew.bury(victim)
        crew.start(regroup_with_the_dead, ranks=others)
        outcomes = crew.finish(others, timeout_s=30)  # before forming would give up
        assert any(name == "PeerLost" for name, _ in outcomes)
        assert all(f"(rank {victim})" in text for _, text in outcomes)


def reduce_odd_strides(group: Group) -> None:
    for op in ("sum", "max"):
        for algorithm in ("ring", "tree", "auto"):
            single = torch.full((1, 2), float(group.rank))[:, 0]
            group.all_reduce(single, op, algorithm=algorithm)
            assert float(single) == 1.0
    whole = torch.full((3, 2), float(group.rank))
    group.broadcast(whole[1:2, 0], 1)
    assert whole[:, 0].tolist() == [group.rank, 1.0, group.rank]


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_one_element_with_an_odd_stride(layout: str) -> None:
    with Crew(2, hosts=layout) as crew:
        crew.run(reduce_odd_strides)


def refuse_shared_elements(group: Group) -> float:
    with pytest.raises(TypeError, match="expanded"):
        group.all_reduce(torch.zeros(1).expand(5))
    with torch.inference_mode():
        made_there = torch.zeros(3)
    with pytest.raises(TypeError, match="inference"):
        group.all_reduce(made_there)
    total = torch.ones(5)
    group.all_reduce(total)
    return float(total[0])


def test_tensors_that_cannot_be_written_are_refused_before_anything_is_sent() -> None:
    with Crew(2) as crew:
        assert crew.run(refuse_shared_elements) == [2.0, 2.0]


def close_in_signal_handler(group: Group) -> str:
    signal.signal(signal.SIGUSR1, lambda *_: group.close())
    say("ready")
    try:
        group.barrier()
    except GroupClosed:
        return "closed"
    return "nothing"


def test_close_in_a_signal_handler_ends_the_operation_it_interrupts() -> None:
    with Crew(2) as crew:
        crew.run(meet)
        crew.start(close_in_signal_handler, ranks=[0])
        crew.hear(0)
        crew.wait_blocked(0)
        os.kill(crew.pid(0), signal.SIGUSR1)
        assert crew.finish([0]) == ["closed"]


def reduce_in_callback(group: Group) -> float:
    """The callback's own operation comes before those that are queued, on every member."""
    total = torch.ones(1)
    finished = threading.Event()

    def callback(_: Handle) -> None:
        group.all_reduce(total)
        finished.set()

    # The first operation holds the lane until both are queued, so that the callback finds one behind it.
    first = group.all_reduce(torch.ones(2_000_000), async_op=True)
    first.add_done_callback(callback)
    second = group.all_reduce(torch.ones(3), async_op=True)
    second.wait(20)
    assert finished.wait(20)
    return float(total)


def test_an_operation_in_a_callback_does_not_wait_for_itself() -> None:
    with Crew(2) as crew:
        assert crew.run(reduce_in_callback) == [2.0, 2.0]


def interrupt_at_the_door(group: Group) -> Any:
    """Something is raised just as an operation begins, before it has sent anything."""
    if group.rank == 0:
        health = group._health
        enter = health.enter

        def interrupted(*arguments: Any) -> None:
            enter(*arguments)
            raise KeyboardInterrupt

        health.enter = interrupted  # type: ignore[method-assign, assignment]
        with pytest.raises(KeyboardInterrupt):
            group.barrier()
        return None
    try:
        group.barrier()
    except GroupError as error:
        return str(error)
    return None


def test_an_interrupt_as_an_operation_begins_ends_the_group() -> None:
    with Crew(2) as crew:
        _, text = crew.run(interrupt_at_the_door)
        assert "KeyboardInterrupt" in text


def deadline_despite_a_departure(group: Group) -> Any:
    """Rank 2 departs while another thread of rank 0 has its poll in hand: the wait must neither spin nor miss its
    deadline."""
    health = group._health
    poll_of_thread = health._poll
    held, released = threading.Event(), threading.Event()

    def slow_poll() -> Any:
        found = poll_of_thread()
        if threading.current_thread().name == "slow":
            held.set()
            released.wait(20)
        return found

    health._poll = slow_poll  # type: ignore[method-assign]
    outcome: list[Any] = []

    def receive() -> None:
        try:
            group.recv(torch.zeros(1), 1, timeout_s=1.0)
        except (DeadlineExceeded, GroupError) as error:
            outcome.append(type(error).__name__)

    thread = threading.Thread(target=receive, name="slow")
    thread.start()
    assert held.wait(20)
    say("held")
    watch = health._peers[2].watch.fileno()
    eventually(lambda: is_ready(watch, READ), "the departure is there to be seen")
    health._examine_all([watch])
    released.set()
    began = time.process_time()
    thread.join(10)
    return outcome, time.process_time() - began


def test_a_departure_at_a_bad_moment_makes_no_busy_loop() -> None:
    with Crew(3) as crew:
        crew.run(meet)
        crew.start(deadline_despite_a_departure, ranks=[0])
        crew.hear(0)
        crew.run(leave, ranks=[2])
        ((outcome, cpu_s),) = crew.finish([0])
        assert outcome == ["DeadlineExceeded"]
        assert cpu_s < 0.5
