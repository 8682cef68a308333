"""Small programs on one process group; each returns what it computed, to be compared between backends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.distributed_c10d import GroupName

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int8, torch.uint8, torch.int32, torch.int64]
ALL = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]
SHAPES: list[tuple[int, ...]] = [(), (1,), (3, 5), (0,), (40_000,), (300_000,)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def sent(tensor: torch.Tensor, rank: int, **arguments: Any) -> dist.Work:
    work = dist.isend(tensor, rank, **arguments)
    assert work is not None
    return work


def posted(tensor: torch.Tensor, rank: int, **arguments: Any) -> dist.Work:
    work = dist.irecv(tensor, rank, **arguments)
    assert work is not None
    return work


def sums_of_all_types_and_shapes(group: ProcessGroup) -> Any:
    results = []
    for dtype in ALL:
        for shape in SHAPES:
            tensor = filled(shape, dtype, group.rank())
            dist.all_reduce(tensor, group=group)
            results.append(tensor)
    return results


def every_reduction(group: ProcessGroup) -> Any:
    results = []
    operations = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    for dtype in [*FLOATS, *INTEGERS, torch.bool]:
        bits = [] if dtype.is_floating_point else [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
        averages = [ReduceOp.AVG] if dtype.is_floating_point else []
        for op in [*operations, *bits, *averages]:
            tensor = filled((70,), dtype, group.rank())
            dist.all_reduce(tensor, op, group=group)
            rooted = filled((7, 3), dtype, group.rank())
            dist.reduce(rooted, dist.get_global_rank(group, group.size() - 1), op, group=group)
            results += [tensor, rooted] if group.rank() == group.size() - 1 else [tensor]
    return results


def averages_of_complex(group: ProcessGroup) -> Any:
    tensor = filled((9,), torch.complex64, group.rank())
    dist.all_reduce(tensor, ReduceOp.AVG, group=group)
    return tensor


def transposed_tensors(group: ProcessGroup) -> Any:
    summed = filled((6, 8), torch.float32, group.rank()).t()
    dist.all_reduce(summed, group=group)
    return summed


def coalesced(group: ProcessGroup) -> Any:
    tensors = [filled((size,), torch.float32, group.rank()) for size in (1, 10, 300_000, 7)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def sparse_sums(group: ProcessGroup) -> Any:
    dense = torch.zeros(6, 4)
    dense[group.rank() : group.rank() + 3] = group.rank() + 1.0
    tensor = dense.to_sparse(1)
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


def broadcasts(group: ProcessGroup) -> Any:
    results = []
    for root in range(group.size()):
        for dtype in ALL:
            tensor = filled((11,), dtype, group.rank())
            dist.broadcast(tensor, dist.get_global_rank(group, root), group=group)
            results.append(tensor)
    return results


def gathers_and_scatters(group: ProcessGroup) -> Any:
    rank, size, results = group.rank(), group.size(), []
    for dtype in (torch.float32, torch.int64, torch.uint8):
        mine = filled((3, 2), dtype, rank)
        every = [torch.zeros_like(mine) for _ in range(size)]
        dist.all_gather(every, mine, group=group)
        rooted = [torch.zeros_like(mine) for _ in range(size)] if rank == 0 else None
        dist.gather(mine, rooted, dist.get_global_rank(group, 0), group=group)
        part = torch.zeros_like(mine)
        parts = [filled((3, 2), dtype, 10 + index) for index in range(size)] if rank == 0 else None
        dist.scatter(part, parts, dist.get_global_rank(group, 0), group=group)
        results += [*every, *(rooted or []), part]
    return results


def one_tensor_for_all(group: ProcessGroup) -> Any:
    rank, size, results = group.rank(), group.size(), []
    for dtype in (torch.float32, torch.int64):
        gathered = torch.zeros(size * 3, 2, dtype=dtype)
        dist.all_gather_into_tensor(gathered, filled((3, 2), dtype, rank), group=group)
        part = torch.zeros(40_001, dtype=dtype)
        dist.reduce_scatter_tensor(part, filled((size * 40_001,), dtype, rank), group=group)
        listed = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter(listed, [filled((5,), dtype, rank + index) for index in range(size)], group=group)
        results += [gathered, part, listed]
    average = torch.zeros(4)
    dist.reduce_scatter_tensor(average, filled((size * 4,), torch.float32, rank), ReduceOp.AVG, group=group)
    # As FSDP does: the input is a part of the output.
    whole = filled((size * 6,), torch.float32, rank)
    dist.all_gather_into_tensor(whole, whole[rank * 6 : rank * 6 + 6], group=group)
    return [*results, average, whole]


def all_to_alls(group: ProcessGroup) -> Any:
    rank, size = group.rank(), group.size()
    even = torch.zeros(size * 2, 3)
    dist.all_to_all_single(even, filled((size * 2, 3), torch.float32, rank), group=group)
    leaving = [index + 1 for index in range(size)]
    arriving = [rank + 1] * size
    uneven = torch.zeros(sum(arriving), 2)
    source = filled((sum(leaving), 2), torch.float32, rank)
    dist.all_to_all_single(uneven, source, arriving, leaving, group=group)
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(outputs, [filled((4,), torch.float32, rank + index) for index in range(size)], group=group)
    return [even, uneven, *outputs]


def messages(group: ProcessGroup) -> Any:
    rank, size, results = group.rank(), group.size(), []
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    for dtype in [*ALL, torch.int16, torch.uint16, torch.float8_e4m3fn]:
        arriving = filled((4, 3), dtype, 99)
        sending = sent(filled((4, 3), dtype, rank), following, group=group)
        dist.recv(arriving, previous, group=group)
        sending.wait()
        results.append(arriving.to(torch.float64) if dtype.itemsize <= 2 else arriving)
    return results


def receives_by_tag(group: ProcessGroup) -> Any:
    """Waits for the second message first, which is posted last and arrives first."""
    rank, size = group.rank(), group.size()
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    arriving = [torch.zeros(100_000), torch.zeros(5)]
    receives = [posted(tensor, previous, group=group, tag=tag) for tag, tensor in enumerate(arriving)]
    second = sent(filled((5,), torch.float32, rank), following, group=group, tag=1)
    receives[1].wait()
    second.wait()
    first = sent(filled((100_000,), torch.float32, rank), following, group=group, tag=0)
    receives[0].wait()
    first.wait()
    return arriving


def receives_from_anybody(group: ProcessGroup) -> Any:
    rank, size = group.rank(), group.size()
    root = dist.get_global_rank(group, 0)
    if rank:
        dist.send(torch.full((2,), float(rank)), root, group=group)
        return None
    found = {}
    for _ in range(size - 1):
        tensor = torch.zeros(2)
        sender = dist.recv(tensor, group=group)
        found[sender] = tensor
    return found


def works_and_futures(group: ProcessGroup) -> Any:
    tensors = [filled((size,), torch.float32, group.rank()) for size in (5, 200_000, 3)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    last = works[-1].get_future().then(lambda future: future.value()[0] * 2)
    for work in works:
        assert work.wait() is True
    assert all(work.is_completed() for work in works)
    barrier = dist.barrier(group=group, async_op=True)
    barrier.wait()
    return [*tensors, last.wait(), works[0].get_future().value()]


def objects(group: ProcessGroup) -> Any:
    rank, size = group.rank(), group.size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank}, group=group)
    told = [rank, "from the root"] if rank == 0 else [None, None]
    dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
    part: list[Any] = [None]
    dist.scatter_object_list(
        part, [[index] for index in range(size)] if rank == 0 else None, dist.get_global_rank(group, 0), group=group
    )
    rooted: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, rooted, dist.get_global_rank(group, 0), group=group)
    return [every, told, part, rooted]


def plain_arguments(group: ProcessGroup) -> Any:
    """The methods of a process group as people call them."""
    tensor = filled((4,), torch.float32, group.rank())
    group.allreduce(tensor, ReduceOp.MAX).wait()
    group.broadcast(other := filled((4,), torch.float32, group.rank()), root=1).wait()
    every = [torch.zeros(2) for _ in range(group.size())]
    group.allgather(every, torch.full((2,), float(group.rank()))).wait()
    group.barrier().wait()
    return [tensor, other, *every]


def a_barrier_without_end(group: ProcessGroup) -> Any:
    """As Lightning has all ranks wait for the one that prepares the data."""
    forever = dist.new_group(backend=dist.get_backend(group), timeout=timedelta(days=10_000))
    barrier: Any = forever
    barrier.monitored_barrier()
    barrier.monitored_barrier(timedelta(seconds=60), wait_all_ranks=True)
    dist.destroy_process_group(forever)


EVERY = [
    sums_of_all_types_and_shapes,
    every_reduction,
    averages_of_complex,
    transposed_tensors,
    coalesced,
    sparse_sums,
    broadcasts,
    gathers_and_scatters,
    one_tensor_for_all,
    all_to_alls,
    messages,
    receives_by_tag,
    receives_from_anybody,
    works_and_futures,
    objects,
    plain_arguments,
    a_barrier_without_end,
]


# -- what Gloo gets wrong or does not do; each checks itself ---------------------------------------------------------


def tensors_with_gaps(group: ProcessGroup) -> None:
    """Gloo writes a strided tensor's elements into the memory between them."""
    every_other = filled((20,), torch.float32, group.rank())
    gaps = every_other[1::2].clone()
    dist.broadcast(every_other[::2], dist.get_global_rank(group, 0), group=group)
    assert torch.equal(every_other[::2], filled((20,), torch.float32, 0)[::2])
    assert torch.equal(every_other[1::2], gaps)
    gathered = torch.zeros(group.size() * 3, 2)[:, 0]
    dist.all_gather_into_tensor(gathered, torch.full((3,), float(group.rank())), group=group)
    assert gathered.tolist() == [float(rank) for rank in range(group.size()) for _ in range(3)]


def messages_between_layouts(group: ProcessGroup) -> None:
    """What one side has in one piece may lie scattered, or in another shape, on the other."""
    rank, size = group.rank(), group.size()
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))
    for dtype in (torch.float32, torch.float8_e4m3fn):
        plain = torch.arange(12).to(dtype).view(4, 3)
        turned = plain.t().contiguous().t()
        for leaving, arriving in ((plain, torch.zeros(3, 4).to(dtype).t()), (turned, torch.zeros(12).to(dtype))):
            sending = sent(leaving, following, group=group)
            dist.recv(arriving, previous, group=group)
            sending.wait()
            assert arriving.to(torch.float32).flatten().tolist() == list(range(12))


def lists_of_different_sizes(group: ProcessGroup) -> None:
    rank, size = group.rank(), group.size()
    every = [torch.zeros(index + 1) for index in range(size)]
    dist.all_gather(every, torch.full((rank + 1,), float(rank)), group=group)
    assert [part.tolist() for part in every] == [[float(index)] * (index + 1) for index in range(size)]
    arriving = [torch.zeros(rank + 1) for _ in range(size)]
    dist.all_to_all(arriving, [torch.full((index + 1,), float(rank)) for index in range(size)], group=group)
    assert [part.tolist() for part in arriving] == [[float(index)] * (rank + 1) for index in range(size)]


def other_types(group: ProcessGroup) -> None:
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn):
        tensor = filled((6,), dtype, group.rank())
        dist.broadcast(tensor, dist.get_global_rank(group, 1), group=group)
        assert torch.equal(tensor.to(torch.float64), filled((6,), dtype, 1).to(torch.float64))
    summed = filled((6,), torch.int16, 0)
    dist.all_reduce(summed, group=group)
    assert torch.equal(summed, filled((6,), torch.int16, 0) * group.size())


def averages_of_integers(group: ProcessGroup) -> None:
    """Rounded towards zero, as NCCL does it."""
    size = group.size()
    for dtype in (torch.int16, torch.int32, torch.int64):
        for sign in (1, -1):
            averaged = torch.full((2, 3), sign * (group.rank() + 7), dtype=dtype).t()
            dist.all_reduce(averaged, ReduceOp.AVG, group=group)
            assert averaged.dtype == dtype
            assert set(averaged.flatten().tolist()) == {int(sum(sign * (rank + 7) for rank in range(size)) / size)}
    dist.all_reduce(later := torch.tensor(group.rank()), ReduceOp.AVG, group=group, async_op=True).wait()
    assert int(later) == (size - 1) // 2


def inference_mode(group: ProcessGroup) -> None:
    with torch.inference_mode():
        tensor = torch.ones(100_000)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert tensor.sum() == 100_000 * group.size()


def one_behind_the_other(group: ProcessGroup) -> None:
    """Waiting calls of one thread between asynchronous ones of another keep their order."""
    tensor, works = torch.ones(3), []
    for _ in range(50):
        works.append(dist.all_reduce(tensor, group=group, async_op=True))
        dist.all_reduce_coalesced([torch.ones(2), torch.ones(1)], group=group)
    for work in works:
        work.wait()
    assert tensor[0] == float(group.size()) ** 50


def callbacks_that_wait(group: ProcessGroup) -> None:
    """As a hook of DDP that reduces twice, and a listener that answers."""
    rank, size = group.rank(), group.size()
    following, previous = (dist.get_global_rank(group, (rank + step) % size) for step in (1, -1))

    def reduce_again(future: torch.futures.Future[Any]) -> torch.Tensor:
        total: torch.Tensor = future.value()[0]
        dist.all_reduce(total, group=group, async_op=True).get_future().wait()
        dist.all_reduce(total, group=group)
        return total

    def receive_again(_: torch.futures.Future[Any]) -> torch.Tensor:
        posted(second := torch.zeros(1), previous, group=group, tag=2).wait()
        return second

    heard = posted(torch.zeros(1), previous, group=group, tag=1).get_future().then(receive_again)
    work: Any = None
    if rank == 0:  # the others come later: here the callback is called by whom it must not hold up
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(reduce_again)
    for tag in (1, 2):
        sent(torch.full((1,), float(tag)), following, group=group, tag=tag).wait()
    assert float(heard.wait()) == 2.0
    if rank:
        posted(torch.zeros(1), dist.get_global_rank(group, 0), group=group, tag=3).wait()
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True).get_future().then(reduce_again)
    else:
        for other in range(1, size):
            sent(torch.zeros(1), dist.get_global_rank(group, other), group=group, tag=3).wait()
    assert work.wait().tolist() == [float(size) ** 3] * 3


def split(group: ProcessGroup) -> None:
    """Torch's own `split_group` asks for an accelerator; the method works without."""
    ranks = [group.size() - 1, 0]
    part = group.split_group(ranks, group_name=GroupName("part"))
    assert (part is not None) == (group.rank() in ranks)
    if part is not None:
        tensor = torch.full((3,), float(part.rank()))
        part.allreduce(tensor).wait()
        assert str(part.group_name) == "part"
        assert (part.rank(), float(tensor[0])) == (ranks.index(group.rank()), 1.0)
        part.shutdown()


def wrong_calls(group: ProcessGroup) -> None:
    """Refused before anything is sent: the group goes on."""
    size = group.size()

    def whole(num: int) -> torch.Tensor:
        return torch.ones(num, dtype=torch.int64)

    wrong: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND, group=group),
        lambda: dist.all_gather([torch.ones(2)] * (size + 1), torch.ones(2), group=group),
        lambda: dist.all_gather_into_tensor(torch.ones(size * 2 + 1), torch.ones(2), group=group),
        lambda: dist.all_to_all_single(torch.ones(size * 2), torch.ones(size * 2), [1] * size, group=group),
        lambda: dist.broadcast(torch.eye(2).to_sparse(), 0, group=group),
        lambda: group.allreduce([torch.ones(1), torch.ones(1)]),
        lambda: dist.reduce_scatter_tensor(whole(1), whole(size), ReduceOp.AVG, group=group),
        lambda: dist.reduce_scatter_tensor(torch.ones(1), torch.ones(size), ReduceOp.BAND, group=group),
        lambda: dist.reduce_scatter_tensor(torch.ones(1).expand(2), torch.ones(size * 2), group=group),
        lambda: dist.all_reduce_coalesced([torch.ones(2), torch.ones(1)], ReduceOp.BAND, group=group),
        lambda: dist.all_to_all_single(whole(size), torch.ones(size), group=group),
        lambda: dist.all_to_all_single(torch.ones(size, 2), torch.ones(size), [1] * size, [1] * size, group=group),
        lambda: dist.all_gather_into_tensor(torch.ones(1).expand(size), torch.ones(1), group=group),
        lambda: group.allgather_coalesced([[torch.ones(1)]] * size, [torch.ones(2)]),
    ]
    for call in wrong:
        with pytest.raises(ValueError):
            call()
        dist.barrier(group)


BEYOND_GLOO = [
    tensors_with_gaps,
    messages_between_layouts,
    lists_of_different_sizes,
    other_types,
    averages_of_integers,
    inference_mode,
    one_behind_the_other,
    callbacks_that_wait,
    split,
    wrong_calls,
]
