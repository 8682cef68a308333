"""An arena never hands out the same memory twice, gives back what is no longer used, and says when there is no
more."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import OutOfSharedMemory
from paceline.testing import faults
from paceline.wire import mapping
from paceline.wire.descriptors import Fd
from paceline.wire.handover import receive_descriptors, send_descriptors
from paceline.wire.mapping import PAGE
from paceline.wire.memory import Arena, SharedMemory, available_bytes, total_bytes
from tests.wire.helpers import EVERY_DTYPE, WAIT_S, connected, in_fork, same_bits, some_tensor, soon

START = PAGE
SIZE = 64 * PAGE


def new_arena(num_bytes: int = SIZE) -> tuple[SharedMemory, Arena]:
    memory = SharedMemory.create(num_bytes)
    return memory, Arena(memory, START)


def num_mappings() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:paceline")


def spans(arena: Arena, tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    found = [(arena.offset_of(tensor), tensor.numel() * tensor.element_size()) for tensor in tensors if tensor.numel()]
    return sorted((offset, offset + num_bytes) for offset, num_bytes in found)


@pytest.mark.parametrize("dtype", EVERY_DTYPE, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0, 3), (0,)], ids=str)
def test_tensors_of_every_type_and_shape_live_in_the_shared_memory(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    memory, arena = new_arena()
    tensor = arena.empty(shape, dtype)
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    wanted = some_tensor(dtype, shape)
    tensor.copy_(wanted)
    assert same_bits(tensor, wanted)
    offset = arena.offset_of(tensor)
    if tensor.numel():
        assert offset >= START
        assert torch.equal(memory.tensor(offset, tensor.numel(), dtype), wanted.reshape(-1))
    else:
        assert offset == -1
        assert memory.committed_bytes() == 0
    memory.close()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.just("take"), st.integers(0, 9 * PAGE)) | st.tuples(st.just("drop"), st.integers(0, 99)),
        max_size=40,
    )
)
def test_any_order_of_taking_and_dropping_never_overlaps_and_gives_all_back(steps: list[tuple[str, int]]) -> None:
    memory, arena = new_arena()
    held: list[tuple[int, torch.Tensor]] = []
    for mark, (action, amount) in enumerate(steps):
        if action == "drop":
            if held:
                held.pop(amount % len(held))
            continue
        with contextlib.suppress(OutOfSharedMemory):
            held.append((mark, arena.empty((amount,), torch.uint8).fill_(mark)))
        taken = spans(arena, [tensor for _, tensor in held])
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(taken))
        assert all(span[0] >= START and span[1] <= SIZE for span in taken)
    assert all((tensor == mark).all() for mark, tensor in held), "somebody wrote into another's memory"
    assert memory.committed_bytes() == sum(-(-tensor.numel() // PAGE) for _, tensor in held) * PAGE
    held.clear()
    assert memory.committed_bytes() == 0
    whole = arena.empty((SIZE - START,), torch.uint8)
    assert arena.offset_of(whole) == START, "the free parts were merged again"
    memory.close()


def test_memory_of_a_dropped_tensor_is_given_back_reused_and_reads_zero() -> None:
    memory, arena = new_arena()
    first = arena.empty((3 * PAGE,), torch.uint8).fill_(7)
    second = arena.empty((PAGE,), torch.uint8).fill_(8)
    offset = arena.offset_of(first)
    assert memory.committed_bytes() == 4 * PAGE
    del first
    assert memory.committed_bytes() == PAGE
    again = arena.empty((2 * PAGE,), torch.uint8)
    assert arena.offset_of(again) == offset
    assert not again.any()
    assert (second == 8).all()
    memory.close()


def test_a_view_keeps_the_memory_of_its_tensor() -> None:
    memory, arena = new_arena()
    tensor = arena.empty((4, PAGE), torch.uint8).fill_(5)
    view = tensor[2].view(-1)[10:20].detach()
    del tensor
    gc.collect()
    others = [arena.empty((PAGE,), torch.uint8).fill_(9) for _ in range(10)]
    assert view.tolist() == [5] * 10
    assert memory.committed_bytes() == 14 * PAGE
    del view, others
    assert memory.committed_bytes() == 0
    memory.close()


def test_a_shape_that_cannot_be_is_refused_before_anything_is_taken() -> None:
    memory, arena = new_arena()
    for shape in [(-1,), (-2, -3), (0, -1)]:
        with pytest.raises(ValueError, match="every extent must be 0 or more"):
            arena.empty(shape, torch.float32)
    assert memory.committed_bytes() == 0
    memory.close()


def test_more_than_the_arena_has_is_out_of_shared_memory_with_a_remedy() -> None:
    memory, arena = new_arena()
    with pytest.raises(OutOfSharedMemory, match="use smaller tensors or fewer members on this host") as caught:
        arena.empty((SIZE - START + 1,), torch.uint8)
    assert isinstance(caught.value, MemoryError)
    held = arena.empty((SIZE - START,), torch.uint8)
    with pytest.raises(OutOfSharedMemory):
        arena.empty((1,), torch.uint8)
    del held
    assert arena.empty((SIZE - START,), torch.uint8).numel() == SIZE - START
    memory.close()


def test_more_than_the_host_has_is_told_before_it_is_taken() -> None:
    memory, arena = new_arena()
    with faults.little_memory(10 * PAGE):
        with pytest.raises(OutOfSharedMemory, match=r"this host has [\d,]+ MiB available"):
            arena.empty((11 * PAGE,), torch.uint8)
        assert memory.committed_bytes() == 0
        assert arena.offset_of(arena.empty((10 * PAGE,), torch.uint8)) == START
    memory.close()


def test_memory_that_the_system_refuses_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, arena = new_arena()

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(mapping, "commit", refuse)
        with pytest.raises(OutOfSharedMemory, match="No space left on device"):
            arena.empty((SIZE - START,), torch.uint8)
    assert arena.offset_of(arena.empty((SIZE - START,), torch.uint8)) == START
    memory.close()


def test_a_size_that_cannot_be_reserved_is_out_of_shared_memory() -> None:
    before = num_mappings()
    for num_bytes in (1 << 62, 0):
        with pytest.raises(OutOfSharedMemory, match="the system refuses to reserve it"):
            SharedMemory.create(num_bytes)
    assert num_mappings() == before


def test_available_memory_is_some_and_not_more_than_there_is() -> None:
    assert 0 < available_bytes() <= total_bytes()


def test_thousands_of_tensors_leave_no_trace() -> None:
    memory, arena = new_arena()
    mappings = num_mappings()
    for number in range(5000):
        arena.empty((1 + number % (3 * PAGE),), torch.uint8)
    assert memory.committed_bytes() == 0
    assert num_mappings() == mappings
    assert len(arena._returned) <= 1
    assert len(arena._free) <= 2
    memory.close()


def test_threads_that_take_and_drop_at_once_never_share_memory() -> None:
    memory, arena = new_arena(1024 * PAGE)
    problems: list[str] = []

    def work(mark: int) -> None:
        for number in range(300):
            tensors = [arena.empty((PAGE + number % 99,), torch.uint8).fill_(mark) for _ in range(3)]
            if not all((tensor == mark).all() for tensor in tensors):
                problems.append(f"thread {mark} found another's bytes")

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not problems
    assert memory.committed_bytes() == 0
    memory.close()


def test_the_mapping_lasts_as_long_as_the_last_tensor_in_it() -> None:
    before = num_mappings()
    memory, arena = new_arena()
    assert num_mappings() == before + 1
    tensor = arena.empty((10,), torch.float32).fill_(3)
    memory.close()
    del memory, arena
    gc.collect()
    assert num_mappings() == before + 1
    assert tensor.tolist() == [3] * 10
    del tensor
    gc.collect()
    assert num_mappings() == before


def test_a_closed_memory_gives_no_more_tensors() -> None:
    memory, arena = new_arena()
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="closed"):
        arena.empty((1,), torch.uint8)


def test_another_process_sees_the_bytes_and_its_writes_are_seen() -> None:
    memory, arena = new_arena()
    tensor = arena.empty((1000,), torch.int32).copy_(torch.arange(1000))
    offset = arena.offset_of(tensor)
    with connected("unix") as (alice, bob):
        socket_of_child = bob.socket.dup()  # not registered, so the child keeps it
        send_descriptors(alice, [memory.descriptor], soon())

        def attach_and_add() -> int:
            bob._sock = socket_of_child
            (descriptor,) = receive_descriptors(bob, 1, soon())
            peers = SharedMemory.attach(descriptor)
            assert peers.num_bytes == SIZE
            seen = peers.tensor(offset, 1000, torch.int32)
            total: int = sum(seen.tolist())
            seen[0] = 4711
            return total

        assert in_fork(attach_and_add) == sum(range(1000))
        socket_of_child.close()
    assert tensor[0] == 4711
    memory.close()


def test_what_a_forked_child_drops_stays_with_its_parent() -> None:
    memory, arena = new_arena()
    held = [arena.empty((PAGE,), torch.uint8).fill_(6)]

    def drop() -> bool:
        held.clear()
        gc.collect()
        return True

    assert in_fork(drop)
    assert (held[0] == 6).all()
    assert memory.committed_bytes() == PAGE
    memory.close()


def test_attaching_what_is_no_memory_is_told() -> None:
    memory = SharedMemory.create(PAGE)
    memory.descriptor.close()
    with pytest.raises(ValueError, match="closed"):
        SharedMemory.attach(memory.descriptor)


def test_an_fd_is_closed_once() -> None:
    memory = SharedMemory.create(PAGE)
    descriptor = Fd(memory.descriptor.fileno())
    memory.descriptor.number = -1
    descriptor.close()
    descriptor.close()
    with pytest.raises(ValueError, match="closed"):
        descriptor.fileno()
