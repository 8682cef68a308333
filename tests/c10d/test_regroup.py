"""Going on with who is left: whoever dies or stands still inside `regroup`, the others end in one world."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

import paceline.c10d
from paceline import errors
from paceline.collective import group, succession
from paceline.store.torch_store import _kept
from paceline.testing import faults
from paceline.testing.crew import Crew, say
from tests.c10d import worlds
from tests.c10d.worlds import each, free_port, init, total, wait_for_the_end_of_threads


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(3, form=False) as crew:
        yield crew


def go_on_with_who_is_left(_: None, rank: int, where: str) -> list[Any]:
    init(rank, where)
    found: list[Any] = [total(), os.getpid()]
    say("under way")
    while True:
        try:
            total()
        except RuntimeError:
            world = paceline.c10d.regroup()
            found += [(world.rank(), world.size()), total()]
            part = dist.new_group([0])
            if dist.get_rank() == 0:
                dist.barrier(part)
            model = DistributedDataParallel(torch.nn.Linear(4, 4))
            model(torch.ones(1, 4)).sum().backward()
            found.append(dist.get_world_size())
            if world.size() == 1:
                dist.destroy_process_group()
                return found
            say("again")


def test_survivors_regroup_until_one_is_left(crew: Crew) -> None:
    """Rank 0 goes first, with torch's store in it."""
    each(crew, go_on_with_who_is_left, f"tcp://127.0.0.1:{free_port()}")
    for rank in range(3):
        crew.hear(rank)
    crew.kill(0)
    for rank in (1, 2):
        crew.hear(rank)
    crew.kill(1)
    (found,) = crew.finish([2])
    assert found == [6.0, crew.pid(2), (1, 2), 3.0, 2, (0, 1), 1.0, 1]


def regroup_after_mismatch(_: None, rank: int, where: str) -> tuple[float, float]:
    init(rank, where)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + rank))
    paceline.c10d.regroup()
    found = total(), float(dist.get_world_size())
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_all_regroup_where_nobody_died(crew: Crew) -> None:
    each(crew, regroup_after_mismatch, f"file://{worlds.new_file()}")
    assert crew.finish() == [(6.0, 3.0)] * 3


def regroup_out_of_a_part(_: None, rank: int, where: str) -> tuple[float, int]:
    """Rank 0 waits in a group that the dead one is not in."""
    init(rank, where)
    part = dist.new_group([0, 1])
    total()
    say("under way")
    operation: Callable[[], Any] = (lambda: dist.barrier(part)) if rank == 0 else total
    with pytest.raises(dist.DistBackendError):
        operation()
    paceline.c10d.regroup(timeout=timedelta(seconds=20))
    found = total(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_regroup_ends_the_groups_over_parts_of_the_world(crew: Crew) -> None:
    each(crew, regroup_out_of_a_part, f"file://{worlds.new_file()}")
    for rank in range(3):
        crew.hear(rank)
    crew.kill(2)
    assert crew.finish([0, 1]) == [(3.0, 2)] * 2


def die_at_order(_: None, number: int) -> None:
    """When it is about to tell the number-th of the others to go on."""
    strike = faults.nth(number, faults.die)
    faults.arm(succession.ORDERING, lambda order: strike() if order == succession.Go.__name__ else None)


def regroup_through_a_death(_: None, rank: int, where: str) -> tuple[float, int]:
    """Rank 0 dies when the next group is there, and before it has told anybody to go on with it."""
    init(rank, where)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + rank))
    if rank == 0:
        die_at_order(None, 1)
    paceline.c10d.regroup(timeout=timedelta(seconds=20))
    found = total(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    wait_for_the_end_of_threads()
    assert not _kept
    return found


def test_a_death_inside_regroup_makes_the_group_smaller(crew: Crew) -> None:
    each(crew, regroup_through_a_death, f"file://{worlds.new_file()}")
    assert crew.finish([1, 2]) == [(3.0, 2)] * 2


# -- who does not come, and what goes well on some only --------------------------------------------------------------


def fail_together(_: None, rank: int, where: str) -> None:
    init(rank, where)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + rank))


def regroup_in_vain(_: None) -> str:
    with pytest.raises(paceline.c10d.TimedOut) as caught:
        paceline.c10d.regroup(timeout=timedelta(seconds=1))
    return str(caught.value)


def regroup_and_end(_: None) -> tuple[float, int]:
    paceline.c10d.regroup(timeout=timedelta(seconds=20))
    found = total(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    wait_for_the_end_of_threads()
    return found


@pytest.mark.parametrize("absent", [0, 2])
def test_who_does_not_come_is_named_and_may_come_later(crew: Crew, absent: int) -> None:
    each(crew, fail_together, f"file://{worlds.new_file()}")
    crew.finish()
    others = [rank for rank in range(3) if rank != absent]
    for told in crew.run(regroup_in_vain, ranks=others):
        assert told.startswith("regroup: waited 1 s for rank")
        assert re.findall(r"rank (\d) to come(?! back)", told) == [str(absent)]
    assert crew.run(regroup_and_end) == [(6.0, 3)] * 3


def fail_once(_: None) -> None:
    """The next group that this process forms is there, and then is not."""
    faults.arm(group.FORMED, faults.nth(1, lambda: faults.fail(errors.GroupAborted("not in the mood"))))


@pytest.mark.parametrize("who", [0, 1])
def test_a_group_that_is_there_on_some_only_is_formed_again(crew: Crew, who: int) -> None:
    each(crew, fail_together, f"file://{worlds.new_file()}")
    crew.finish()
    crew.run(fail_once, ranks=[who])
    assert crew.run(regroup_and_end) == [(6.0, 3)] * 3


def regroup_until_all_work(_: None) -> tuple[float, int]:
    while True:
        paceline.c10d.regroup(timeout=timedelta(seconds=20))
        try:
            found = total(), dist.get_world_size()
            dist.barrier()
        except RuntimeError:
            continue
        dist.destroy_process_group()
        return found


def test_those_who_went_on_with_a_dead_leader_come_back_to_those_who_did_not(crew: Crew) -> None:
    each(crew, fail_together, f"file://{worlds.new_file()}")
    crew.finish()
    crew.run(die_at_order, 2, ranks=[0])
    crew.start(regroup_until_all_work)
    assert crew.finish([1, 2]) == [(3.0, 2)] * 2


def regroup_after_abort(_: None) -> None:
    with pytest.raises(paceline.c10d.WrongCall, match="call init_process_group first"):
        paceline.c10d.regroup()
    dist.init_process_group("paceline", store=HashStore(), rank=0, world_size=1)
    assert paceline.c10d.regroup().size() == 1
    world = dist.group.WORLD
    assert world is not None
    world.abort()
    with pytest.raises(paceline.c10d.WrongCall, match="aborted or shut down here"):
        paceline.c10d.regroup()
    dist.destroy_process_group()
    wait_for_the_end_of_threads()


def test_a_world_that_is_gone_cannot_regroup(crew: Crew) -> None:
    crew.run(regroup_after_abort, ranks=[0])


# -- faults at any moment --------------------------------------------------------------------------------------------

STAND_STILL_S = 0.3


class Strike:
    """Kills or stops its own process, once."""

    def __init__(self, action: signal.Signals) -> None:
        self._action = action
        self.is_over = False

    def __call__(self) -> None:
        if not self.is_over:
            self.is_over = True
            say("now")
            os.kill(os.getpid(), self._action)


def regroup_until(_: None, rank: int, where: str, hosts: str, left: int, fault: tuple[int, int] | None) -> Any:
    """The fault is a signal, and how often bytes are sent or received on new connections before that."""
    num_open = len(os.listdir("/proc/self/fd"))
    init(rank, where, len(hosts), host_label=hosts[rank])
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + rank))
    if fault is None:
        return regroup_until_left(rank, left, lambda: None, num_open)
    strike = Strike(signal.Signals(fault[0]))
    with faults.traffic(faults.nth(fault[1], strike)):
        return regroup_until_left(rank, left, strike, num_open)


def regroup_until_left(rank: int, left: int, strike: Callable[[], None], num_open: int) -> Any:
    while True:
        paceline.c10d.regroup(timeout=timedelta(seconds=30))
        strike()  # at the latest
        try:
            found = [total() for _ in range(3)]
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, rank)
            part = dist.new_group([0])
            if dist.get_rank() == 0:
                dist.barrier(part)
            dist.barrier()
            if len(everybody) == left:
                break
        except RuntimeError:
            continue
    with_all = everybody, found[0], dist.get_rank() == everybody.index(rank)
    dist.destroy_process_group()
    wait_for_the_end_of_threads()
    assert not _kept
    assert len(os.listdir("/proc/self/fd")) <= num_open + 1, [
        os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()
    ]
    return with_all


def check_case(seed: int) -> None:
    choose = random.Random(seed)
    size = choose.choice([3, 4, 5])
    hosts = choose.choice(["a" * size, ("aab" * size)[:size]])
    victims = choose.sample(range(size), choose.choice([1, 1, 2]))
    actions = {victim: choose.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP]) for victim in victims}
    moments = {victim: choose.randrange(1, 60) for victim in victims}
    left = [rank for rank in range(size) if actions.get(rank) != signal.SIGKILL]
    where, about = f"file://{worlds.new_file()}", f"seed {seed}: on {hosts}, {actions}, {moments}"
    with Crew(size, form=False) as crew:
        for rank in range(size):
            fault = (actions[rank], moments[rank]) if rank in victims else None
            crew.start(regroup_until, rank, where, hosts, len(left), fault, ranks=[rank])
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda victim: let_go_on(crew, victim, actions[victim]), victims))
        outcomes = crew.outcomes(left)
    for outcome in outcomes:
        assert outcome == (left, len(left) * (len(left) + 1) / 2, True), (about, outcomes)


def let_go_on(crew: Crew, victim: int, action: signal.Signals) -> None:
    assert crew.hear(victim) == "now"
    if action == signal.SIGSTOP:
        time.sleep(STAND_STILL_S)
        crew.resume(victim)


@pytest.mark.parametrize("seed", range(4))
def test_survivors_end_in_one_world_whoever_dies_or_stands_still_in_regroup(seed: int) -> None:
    check_case(seed)
