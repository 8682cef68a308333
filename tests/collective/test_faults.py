"""Death, silence, abort, departure: every survivor learns of it, by name, and goes on in a new group in the same
process."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.collective import Group
from paceline.collective.neighbourhood import FIXED_BYTES, LIFELINES_AT
from paceline.errors import DeadlineExceeded, GroupAborted, GroupClosed, GroupError, PeerLost
from paceline.testing.crew import Crew, say
from paceline.testing.eventually import eventually
from tests.collective import layouts

# Far above what it takes (milliseconds), far below any deadline of a wait: what is tested is that the death itself
# ends the wait.
AT_ONCE_S = 5.0

DEATHS = [(layout, name) for layout in ["aa", "aaaa", "ab", "abcd", "aabb"] for name in layouts.algorithms(layout)]


def reduce_forever(group: Group, algorithm: str, num: int) -> Any:
    tensor = group.empty((num,)).zero_()
    for count in itertools.count():
        try:
            group.all_reduce(tensor, algorithm=algorithm)
        except GroupError as error:
            return error, time.monotonic()
        if count == 3:
            say("under way")
    return None


@pytest.mark.parametrize(("layout", "algorithm"), DEATHS)
def test_a_death_in_the_middle_is_named_on_every_survivor(layout: str, algorithm: str) -> None:
    victim = len(layout) - 1
    survivors = range(victim)
    with Crew(len(layout), hosts=layout) as crew:
        names = crew.run(member_ids)[0]
        crew.start(reduce_forever, algorithm, 50_000)
        for rank in range(crew.size):
            crew.hear(rank)
        crew.kill(victim)
        killed_at = time.monotonic()
        for error, noticed_at in crew.finish(survivors):
            assert isinstance(error, PeerLost)
            assert (error.member, error.rank) == (names[victim], victim)
            assert names[victim] in str(error)
            assert "all_reduce" in str(error)
            assert noticed_at - killed_at < AT_ONCE_S


def member_ids(group: Group) -> list[str]:
    return [card.member for card in group.cards]


def wait_for_absent(group: Group) -> Any:
    """Everybody but the last calls a barrier that therefore cannot end."""
    say("waiting")
    if group.rank == group.size - 1:
        time.sleep(60)
    try:
        group.barrier()
    except GroupError as error:
        return error
    return None


@pytest.mark.parametrize("layout", ["aaaa", "abcd", "aabb"])
def test_members_that_wait_for_others_see_a_death_too(layout: str) -> None:
    """Rank 1 dies; ranks 0 and 2 wait for the absent rank 3."""
    with Crew(4, hosts=layout) as crew:
        crew.start(wait_for_absent)
        for rank in range(4):
            crew.hear(rank)
        crew.kill(1)
        for error in crew.finish([0, 2], timeout_s=AT_ONCE_S):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
        crew.kill(3)


@pytest.mark.parametrize("layout", ["aaaa", "abcd", "aabb"])
def test_two_deaths_at_once(layout: str) -> None:
    with Crew(4, hosts=layout) as crew:
        crew.start(reduce_forever, "auto", 1000)
        for rank in range(4):
            crew.hear(rank)
        crew.kill(2)
        crew.kill(3)
        for error, _ in crew.finish([0, 1], timeout_s=AT_ONCE_S):
            assert isinstance(error, PeerLost)
            assert error.rank in (2, 3)


def load_and_reduce(group: Group) -> Any:
    from torch.utils.data import DataLoader, TensorDataset

    dataset = TensorDataset(torch.arange(1000))
    group.all_reduce(torch.zeros(10))  # all connections are made before the fork
    if group.rank == 1:
        batches = iter(DataLoader(dataset, num_workers=2, batch_size=10, multiprocessing_context="fork"))
        next(batches)
    return reduce_forever(group, "auto", 10)


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_loader_workers_do_not_hide_the_death_of_their_parent(layout: str) -> None:
    with Crew(2, hosts=layout) as crew:
        crew.start(load_and_reduce)
        crew.hear(0)
        crew.hear(1)
        loaders = children_of(crew.pid(1))
        assert len(loaders) == 2
        crew.kill(1)
        ((error, _),) = crew.finish([0], timeout_s=AT_ONCE_S)
        assert isinstance(error, PeerLost)
        # The loaders end by themselves seconds after their parent; that is torch's part. None may be left here.
        for pid in loaders:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        eventually(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in loaders), "the loader workers are gone")


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]


def abort_while_waiting(group: Group) -> Any:
    if group.rank == 0:
        threading.Timer(0.2, group.abort, ["the user said so"]).start()
    elif group.rank == group.size - 1:
        time.sleep(0.5)
    return errors_of_barriers(group, 4)


def errors_of_barriers(group: Group, num: int, timeout_s: float | None = None) -> list[Exception]:
    """A late member may complete the operation that the others gave up, because they did come; never a later one."""
    errors: list[Exception] = []
    for _ in range(num):
        try:
            group.barrier(timeout_s=timeout_s)
        except (DeadlineExceeded, GroupError) as error:
            errors.append(error)
    return errors


@pytest.mark.parametrize("layout", ["aa", "ab", "aabb"])
def test_abort_unblocks_waits_here_and_elsewhere_and_lasts(layout: str) -> None:
    with Crew(len(layout), hosts=layout) as crew:
        for errors in crew.run(abort_while_waiting):
            assert len(errors) >= 3
            assert all(isinstance(error, GroupAborted) and "the user said so" in str(error) for error in errors)
            assert all("rank 0" in str(error) for error in errors)


def abort_reaches_every_thread(group: Group) -> None:
    """A message under way, an asynchronous collective and the caller all wait; one abort ends all of them."""
    pending = [group.all_reduce(torch.zeros(10), async_op=True)]
    if group.rank == 0:
        pending.append(group.recv(torch.zeros(3), 1, async_op=True))
    group.abort("enough")
    for handle in pending:
        with pytest.raises(GroupAborted):
            handle.wait(AT_ONCE_S)


def test_abort_ends_asynchronous_operations_and_messages() -> None:
    with Crew(2) as crew:
        crew.run(abort_reaches_every_thread, ranks=[0, 1])


def errors_of_impatience(group: Group) -> list[Exception]:
    return errors_of_barriers(group, 2, timeout_s=0.5)


def meet(group: Group) -> None:
    group.barrier()


@pytest.mark.parametrize("layout", ["aa", "ab"])
def test_a_deadline_names_who_was_waited_for(layout: str) -> None:
    with Crew(2, hosts=layout) as crew:
        crew.run(meet)
        (waited, *_), *_ = crew.run(errors_of_impatience, ranks=[0])
        (*_, late), *_ = crew.run(errors_of_impatience, ranks=[1])  # which comes when rank 0 has given up
        assert isinstance(waited, DeadlineExceeded)
        assert "rank 1" in str(waited)
        assert "barrier" in str(waited)
        assert isinstance(late, GroupAborted)
        assert "rank 0" in str(late)


def leave_early(group: Group) -> Any:
    group.barrier()
    if group.rank == 1:
        group.close()
        with pytest.raises(GroupClosed):
            group.barrier()
        return None
    try:
        group.barrier()
    except GroupError as error:
        return error
    return None


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_a_member_that_left_is_named(layout: str) -> None:
    with Crew(3, hosts=layout) as crew:
        first, _, third = crew.run(leave_early)
        for error in (first, third):
            assert isinstance(error, PeerLost)
            assert error.rank == 1
            assert "left" in str(error)


def leave(group: Group) -> None:
    group.close()


def exchange_without_the_first(group: Group) -> None:
    if group.rank == 1:
        group.send(torch.ones(10), 2)
    else:
        group.recv(torch.zeros(10), 1)


@pytest.mark.parametrize("layout", ["aaa", "abc"])
def test_a_goodbye_disturbs_nobody_who_does_not_need_the_leaver(layout: str) -> None:
    """Who is done may go while others are still busy with each other."""
    with Crew(3, hosts=layout) as crew:
        crew.run(meet)
        crew.run(leave, ranks=[0])
        crew.run(exchange_without_the_first, ranks=[1, 2])


def be_interrupted(group: Group) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it
    say("ready")
    with pytest.raises(KeyboardInterrupt):
        group.barrier()


def come_later(group: Group) -> Exception:
    return errors_of_barriers(group, 2)[-1]


def test_ctrl_c_inside_an_operation_is_told_to_the_others() -> None:
    """Something raises in the middle of an operation of rank 0: the others must not wait for it."""
    with Crew(2) as crew:
        crew.run(meet)
        crew.start(be_interrupted, ranks=[0])
        crew.hear(0)
        crew.wait_blocked(0)
        os.kill(crew.pid(0), signal.SIGINT)
        crew.finish([0])
        (error,) = crew.run(come_later, ranks=[1])
        assert isinstance(error, GroupAborted)
        assert "KeyboardInterrupt" in str(error)


# -- the next group
# ---------------------------------------------------------------------------------------------------


def survive(group: Group, survivors: list[int]) -> Any:
    error = reduce_forever(group, "auto", 1000)[0]
    following = group.regroup(survivors)
    group.close()
    with following:
        tensor = following.empty((1000,)).fill_(following.rank + 1)
        following.all_reduce(tensor)
        following.barrier()
        return error, float(tensor[0]), following.size, os.getpid()


@pytest.mark.parametrize("layout", ["aaa", "abc", "aabb"])
def test_survivors_form_a_new_group_in_the_same_processes(layout: str) -> None:
    size = len(layout)
    survivors = [rank for rank in range(size) if rank != 1]
    with Crew(size, hosts=layout) as crew:
        crew.start(survive, survivors)
        for rank in range(size):
            crew.hear(rank)
        crew.kill(1)
        for rank, (error, total, new_size, pid) in zip(survivors, crew.finish(survivors), strict=True):
            assert isinstance(error, PeerLost)
            assert new_size == size - 1
            assert total == sum(range(size))
            assert pid == crew.pid(rank)


def regroup_many_times(group: Group) -> int:
    """Groups of changing membership, each formed while the one before works."""
    generations = 0
    forming = ThreadPoolExecutor(1)
    for ranks in ([0, 1], [1, 0], [0, 1, 2], [2, 0, 1]):
        future = forming.submit(group.regroup, ranks) if group.rank in ranks else None
        for _ in range(20):
            group.all_reduce(torch.ones(100))
        if future is not None:
            with future.result(30) as following:
                tensor = torch.ones(100)
                following.all_reduce(tensor)
                assert float(tensor[0]) == len(ranks)
                generations += 1
    forming.shutdown()
    return generations


def test_the_next_group_forms_in_the_background_while_this_one_works() -> None:
    with Crew(3) as crew:
        assert crew.run(regroup_many_times) == [4, 4, 2]


def hear_of_a_death(group: Group) -> Any:
    """Rank 0 is in no operation of the group when rank 1 dies."""
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    group.on_death = heard.put
    group.barrier()
    say("ready")
    if group.rank == 1:
        time.sleep(60)
    member = heard.get(timeout=10)
    with pytest.raises(PeerLost) as caught:
        group.barrier()
    return member == group.cards[1].member, caught.value.rank, caught.value.died


def test_a_death_is_told_to_neighbours_that_wait_for_nothing() -> None:
    with Crew(2) as crew:
        crew.start(hear_of_a_death)
        crew.hear(0)
        crew.hear(1)
        crew.kill(1)
        assert crew.finish([0], timeout_s=20) == [(True, 1, True)]


def late_waker(group: Group, permission: Path) -> str:
    """Rank 2: stands still with the old group's memory mapped, and writes to all slots and tensors when it wakes."""
    tensors = [group.empty((1 << 20,)).fill_(1.0)]
    group.all_reduce(tensors[0])
    memories = dict(group._parts.local.memories)
    say("ready")
    while not permission.exists():  # the test stops this process here, and gives permission while it stands still
        time.sleep(0.01)
    for memory in memories.values():
        memory.bytes[:LIFELINES_AT].fill_(7)
        memory.bytes[FIXED_BYTES : FIXED_BYTES + (4 << 20)].fill_(7)
    return "wrote"


def survivor_of_silence(group: Group) -> Any:
    old = group.empty((1 << 20,)).fill_(1.0)
    group.all_reduce(old)
    say("ready")
    with contextlib.suppress(GroupError):
        group.barrier()
    following = group.regroup([0, 1])
    group.close()
    fresh = following.empty((1 << 20,)).fill_(3.0)
    say("regrouped")
    for _ in range(100):
        following.all_reduce(fresh, "max")
        time.sleep(0.005)
    following.barrier()
    untouched = bool((fresh == 3.0).all())
    overwritten = float(old[0]) not in (1.0, 3.0)
    following.close()
    return untouched, overwritten


def test_a_member_that_wakes_late_cannot_write_into_memory_in_use(tmp_path: Path) -> None:
    permission = tmp_path / "permission"
    with Crew(3) as crew:
        crew.start(survivor_of_silence_with_abort, ranks=[0])
        crew.start(survivor_of_silence, ranks=[1])
        crew.start(late_waker, permission, ranks=[2])
        for rank in range(3):
            crew.hear(rank)
        crew.stop(2)
        crew.hear(0)
        crew.hear(1)
        permission.touch()
        crew.resume(2)
        results = crew.finish([0, 1])
        assert all(untouched for untouched, _ in results)
        assert any(overwritten for _, overwritten in results), "the late store missed: this test has shown nothing"
        assert crew.finish([2]) == ["wrote"]


def survivor_of_silence_with_abort(group: Group) -> Any:
    threading.Timer(0.5, group.abort, ["rank 2 is silent"]).start()
    return survivor_of_silence(group)
