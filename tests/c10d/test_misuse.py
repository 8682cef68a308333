"""What an unlucky or hostile caller does: told before anything is sent, and the group goes on; or right all along."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import paceline.c10d
from paceline.testing.crew import Crew
from tests.c10d import worlds
from tests.c10d.worlds import each, init, wait_for_the_end_of_threads


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2, form=False) as crew:
        each(crew, begin, f"file://{worlds.new_file()}")
        crew.finish()
        yield crew
        crew.run(end)


def begin(_: None, rank: int, where: str) -> None:
    init(rank, where, 2)


def end(_: None) -> None:
    dist.barrier()
    dist.destroy_process_group()
    wait_for_the_end_of_threads()


def assert_works(group: dist.ProcessGroup | None = None) -> None:
    tensor = torch.full((10,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [3.0] * 10


@pytest.mark.filterwarnings("ignore")
def give_wrong_tensors(_: None) -> list[str]:
    quantized = torch.quantize_per_tensor(torch.arange(4.0), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with FakeTensorMode():
        fake = torch.ones(3)
    calls: list[Callable[[], object]] = [
        lambda: dist.broadcast(quantized, 0),
        lambda: dist.all_gather([quantized, quantized], quantized),
        lambda: dist.all_reduce(nested),
        lambda: dist.all_gather_into_tensor(torch.zeros(10), nested),
        lambda: dist.all_reduce(fake),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [5, -1], [5, -1]),
    ]
    told = []
    for call in calls if dist.get_rank() == 0 else []:  # the other knows nothing of it
        with pytest.raises(paceline.c10d.WrongCall) as caught:
            call()
        told.append(str(caught.value))
    assert_works()
    return told


def test_tensors_that_cannot_be_moved_are_refused_and_the_group_goes_on(crew: Crew) -> None:
    words = ["quantized", "quantized", "nested", "nested", "fake", "none below 0"]
    for text, word in zip(crew.run(give_wrong_tensors)[0], words, strict=True):
        assert word in text


def overlap(_: None) -> None:
    """The output of a gather holds the input, in its place, half in it, or in that of another rank."""
    rank, num = dist.get_rank(), 200_000
    for start in (rank * num, num // 2, (1 - rank) * num):
        whole = torch.zeros(2 * num)
        whole[start : start + num] = rank + 1
        dist.all_gather_into_tensor(whole, whole[start : start + num])
        assert bool((whole[:num] == 1).all())
        assert bool((whole[num:] == 2).all())
    assert_works()


def test_an_output_may_overlap_the_input(crew: Crew) -> None:
    crew.run(overlap)


def use_in_a_child(_: None) -> list[str]:
    """With a thread of the group's own, and one that waits in it, at the time of the fork."""
    group = dist.new_group(timeout=worlds.TIMEOUT)
    assert group is not None
    dist.all_reduce(torch.ones(3), group=group, async_op=True).wait()
    other = 1 - dist.get_rank()
    pending = dist.irecv(torch.zeros(3), other, group=group)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], Any]] = [
            lambda: dist.all_reduce(torch.ones(3), group=group),
            lambda: dist.all_reduce(torch.ones(3), group=group, async_op=True).wait(),
            lambda: dist.isend(torch.ones(3), other, group=group).wait(),  # type: ignore[union-attr]
            lambda: dist.irecv(torch.ones(3), other, group=group).wait(),  # type: ignore[union-attr]
            lambda: dist.destroy_process_group(),
        ]
        for call in calls:
            try:
                call()
                os.write(writer, b"none\n")
            except BaseException as error:
                os.write(writer, f"{type(error).__name__}: {error}\n".encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = pipe.read().splitlines()
    assert os.waitpid(child, 0) == (child, 0)
    dist.send(torch.ones(3), other, group=group)
    assert pending is not None
    pending.wait()
    assert_works(group)
    dist.destroy_process_group(group)
    return told


def test_a_forked_child_is_told_that_it_has_no_part_in_the_group(crew: Crew) -> None:
    for told in crew.run(use_in_a_child):
        assert len(told) == 5
        for text in told[:4]:
            assert text.startswith("Aborted: ")
            assert "a process forked from it has no part in it" in text
        assert told[4] == "none"


def destroy_while_others_wait(_: None) -> list[str]:
    group = dist.new_group(timeout=worlds.TIMEOUT)
    assert group is not None
    told: list[str] = []

    def call(operation: Callable[[], object]) -> None:
        with pytest.raises(dist.DistBackendError) as caught:
            operation()
        told.append(str(caught.value))

    if dist.get_rank() == 0:
        calls = (lambda: dist.recv(torch.zeros(3), 1, group=group), lambda: dist.barrier(group))
        threads = [threading.Thread(target=call, args=(one,)) for one in calls]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        forgotten = dist.all_reduce(torch.ones(9), group=group, async_op=True)
        dist.destroy_process_group(group)
        for thread in threads:
            thread.join()
        call(forgotten.wait)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    return told


def test_a_group_destroyed_under_other_threads_tells_them(crew: Crew) -> None:
    told = crew.run(destroy_while_others_wait)[0]
    assert len(told) == 3


def make_many(_: None) -> tuple[int, int]:
    counts = []
    for num in (3, 30):
        for _number in range(num):
            group = dist.new_group(timeout=worlds.TIMEOUT)
            dist.all_reduce(torch.ones(2), group=group, async_op=True)  # nobody waits for it
            dist.barrier(group)
            dist.destroy_process_group(group)
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts[0], counts[1]


def test_groups_made_and_destroyed_leave_nothing(crew: Crew) -> None:
    for before, after in crew.run(make_many):
        assert after <= before + 2  # a handshake may be ending
