"""One contract for every algorithm on every mix of hosts: the results are right, equal in all bits, for every type
and reduction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.collective import Group, Handle
from paceline.collective.memory_channel import BIN_BYTES, LARGE_BYTES
from paceline.testing.crew import Crew
from tests.collective import layouts

SIZES = [0, 1, 2, 7, 1000, 16 * 1024 + 1, 300_001]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
EVERY_DTYPE = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]


@pytest.fixture(scope="module", params=layouts.ALL)
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    with Crew(len(request.param), hosts=request.param) as crew:
        crew.layout = request.param  # type: ignore[attr-defined]
        yield crew


def algorithms_of(group: Group) -> list[str]:
    return ["auto", "ring", "tree", "hierarchical", *(["direct"] if len(group.hosts) == 1 else [])]


def make(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers that differ by rank: sums and products are exact in every type."""
    values = (torch.arange(num) * 7 + rank * 3) % 5
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def expected(op: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    stacked = torch.stack(tensors)
    wide = stacked if stacked.dtype == torch.bool or stacked.is_complex() else stacked.to(torch.float64)
    if op in ("sum", "mean"):
        total = stacked.any(0) if stacked.dtype == torch.bool else wide.sum(0)
        return (total / len(tensors) if op == "mean" else total).to(stacked.dtype)
    if op == "product":
        return (stacked.all(0) if stacked.dtype == torch.bool else wide.prod(0)).to(stacked.dtype)
    if op in ("min", "max"):
        chosen = wide.to(torch.float64).amin(0) if op == "min" else wide.to(torch.float64).amax(0)
        return chosen.to(stacked.dtype)
    combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op]
    result = tensors[0]
    for tensor in tensors[1:]:
        result = combine(result, tensor)
    return result


def check_all_reduce(group: Group, op: str, dtypes: list[torch.dtype], sizes: list[int]) -> None:
    for algorithm in algorithms_of(group):
        for dtype in dtypes:
            for num in sizes:
                inputs = [make(rank, num, dtype) for rank in range(group.size)]
                want = expected(op, inputs)
                for tensor in (inputs[group.rank].clone(), group.empty((num,), dtype).copy_(inputs[group.rank])):
                    group.all_reduce(tensor, op, algorithm=algorithm)
                    assert torch.equal(tensor, want), (algorithm, op, dtype, num)


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_all_reduce_is_right_at_every_size(crew: Crew, op: str) -> None:
    crew.run(check_all_reduce, op, [torch.float32], SIZES)


def test_all_reduce_takes_every_dtype(crew: Crew) -> None:
    crew.run(check_all_reduce, "sum", EVERY_DTYPE, [1000])


@pytest.mark.parametrize("op", ["product", "min", "max", "band", "bor", "bxor"])
def test_all_reduce_by_every_reduction(crew: Crew, op: str) -> None:
    dtypes = [*INTEGERS, torch.bool] if op.startswith("b") else [torch.float32, torch.int64, torch.bool]
    crew.run(check_all_reduce, op, dtypes, [999])


def check_same_bits(group: Group) -> None:
    generator = torch.Generator().manual_seed(group.rank)
    for algorithm in algorithms_of(group):
        for num in (10, 50_001):
            for op in ("sum", "mean"):
                tensor = torch.randn(num, generator=generator)
                group.all_reduce(tensor, op, algorithm=algorithm)
                everybody = [torch.empty(num) for _ in range(group.size)]
                group.all_gather(everybody, tensor)
                assert all(torch.equal(other, tensor) for other in everybody), (algorithm, num, op)


def test_all_members_get_the_same_bits_from_rounding_sums(crew: Crew) -> None:
    crew.run(check_same_bits)


def check_mixed_memory(group: Group) -> None:
    """Some members' tensors lie in the arena, others' do not."""
    for algorithm in algorithms_of(group):
        num = 200_000
        tensor = group.empty((num,)) if group.rank % 2 else torch.empty(num)
        tensor.fill_(group.rank)
        group.all_reduce(tensor, algorithm=algorithm)
        assert bool((tensor == sum(range(group.size))).all()), algorithm


def test_arena_and_ordinary_tensors_mix(crew: Crew) -> None:
    crew.run(check_mixed_memory)


def check_layouts_of_memory(group: Group) -> None:
    for algorithm in algorithms_of(group):
        matrix = torch.full((300, 200), float(group.rank)).t()
        strided = torch.zeros(1000)
        strided[::2] = group.rank
        scalar = torch.tensor(float(group.rank))
        weight = torch.full((3, 4), float(group.rank), requires_grad=True)
        for tensor in (matrix, strided[::2], scalar, weight):
            group.all_reduce(tensor, algorithm=algorithm)
            assert bool((tensor == sum(range(group.size))).all())
        assert float(strided[1::2].sum()) == 0.0
        assert weight.grad_fn is None


def test_any_memory_layout_works_in_place(crew: Crew) -> None:
    crew.run(check_layouts_of_memory)


def check_moves(group: Group, num: int) -> None:
    rank, size = group.rank, group.size
    for root in range(size):
        tensor = make(rank, num, torch.float32)
        group.broadcast(tensor, root)
        assert torch.equal(tensor, make(root, num, torch.float32))

        tensor = make(rank, num, torch.float32)
        group.reduce(tensor, root)
        inputs = [make(other, num, torch.float32) for other in range(size)]
        assert torch.equal(tensor, expected("sum", inputs) if rank == root else inputs[rank])

        outputs = [torch.zeros(num + other) for other in range(size)] if rank == root else None
        group.gather(make(rank, num + rank, torch.float32), outputs, root)
        if outputs is not None:
            assert all(torch.equal(out, make(k, num + k, torch.float32)) for k, out in enumerate(outputs))

        inputs_or_none = [make(other, num + other, torch.float32) for other in range(size)] if rank == root else None
        output = torch.zeros(num + rank)
        group.scatter(output, inputs_or_none, root)
        assert torch.equal(output, make(rank, num + rank, torch.float32))


@pytest.mark.parametrize("num", [0, 3, 40_000, 200_000])
def test_broadcast_reduce_gather_scatter(crew: Crew, num: int) -> None:
    crew.run(check_moves, num)


def check_exchanges(group: Group, num: int) -> None:
    rank, size = group.rank, group.size
    outputs = [torch.zeros(num + 5 * other, dtype=torch.int64) for other in range(size)]
    group.all_gather(outputs, torch.full((num + 5 * rank,), rank))
    assert all(bool((out == other).all()) for other, out in enumerate(outputs))

    for op in ("sum", "mean", "max"):
        inputs = [torch.full((num + 3 * target,), float(rank * 10 + target)) for target in range(size)]
        output = torch.zeros(num + 3 * rank)
        group.reduce_scatter(output, inputs, op)
        column = [float(source * 10 + rank) for source in range(size)]
        want = {"sum": sum(column), "mean": sum(column) / size, "max": max(column)}[op]
        torch.testing.assert_close(output, torch.full_like(output, want))

    inputs = [torch.full((num + rank + 2 * target,), rank * 100 + target) for target in range(size)]
    outputs = [torch.zeros(num + source + 2 * rank, dtype=torch.int64) for source in range(size)]
    group.all_to_all(outputs, inputs)
    assert all(bool((out == source * 100 + rank).all()) for source, out in enumerate(outputs))
    group.barrier()


@pytest.mark.parametrize("num", [0, 3, 150_000])
def test_all_gather_reduce_scatter_all_to_all_of_uneven_sizes(crew: Crew, num: int) -> None:
    crew.run(check_exchanges, num)


def check_every_dtype_moves(group: Group) -> None:
    for dtype in EVERY_DTYPE:
        outputs = [torch.empty(100, dtype=dtype) for _ in range(group.size)]
        group.all_gather(outputs, make(group.rank, 100, dtype))
        assert all(torch.equal(out, make(rank, 100, dtype)) for rank, out in enumerate(outputs)), dtype


def test_every_dtype_moves(crew: Crew) -> None:
    crew.run(check_every_dtype_moves)


def check_async(group: Group) -> None:
    tensors = [torch.full((num,), float(group.rank)) for num in (1, 1000, 100_000) for _ in range(5)]
    handles = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    late = torch.full((10,), 1.0)
    group.all_reduce(late)  # must keep its place behind the asynchronous ones
    for handle in handles:
        handle.wait(30.0)
        assert handle.done()
    assert all(bool((tensor == sum(range(group.size))).all()) for tensor in tensors)
    assert bool((late == group.size).all())


def test_asynchronous_operations_keep_their_order(crew: Crew) -> None:
    crew.run(check_async)


def check_mixed_modes(group: Group, waiting: list[int]) -> None:
    """Some members wait in the call, others later. How large the pieces are depends on that, and must not differ."""
    rank, size, num = group.rank, group.size, 800_003
    is_async = rank not in waiting
    values = [torch.arange(num, dtype=torch.float32) % 1000 + other for other in range(size)]
    summed = torch.stack(values).sum(0)

    def done(handle: Handle) -> None:
        handle.wait(30.0)

    for algorithm in algorithms_of(group):
        for tensor in (values[rank].clone(), group.empty((num,)).copy_(values[rank])):
            done(group.all_reduce(tensor, algorithm=algorithm, async_op=is_async))
            assert torch.equal(tensor, summed), algorithm
    for root in {0, size - 1}:
        tensor = values[rank].clone()
        done(group.broadcast(tensor, root, async_op=is_async))
        assert torch.equal(tensor, values[root])
        tensor = values[rank].clone()
        done(group.reduce(tensor, root, async_op=is_async))
        assert torch.equal(tensor, summed if rank == root else values[rank])
        parts = [torch.zeros(num) for _ in range(size)] if rank == root else None
        done(group.gather(values[rank], parts, root, async_op=is_async))
        assert parts is None or all(map(torch.equal, parts, values))
        part = torch.zeros(num)
        done(group.scatter(part, values if rank == root else None, root, async_op=is_async))
        assert torch.equal(part, values[rank])
    outputs = [torch.zeros(num) for _ in range(size)]
    done(group.all_gather(outputs, values[rank], async_op=is_async))
    assert all(map(torch.equal, outputs, values))
    outputs = [torch.zeros(num) for _ in range(size)]
    done(group.all_to_all(outputs, [values[rank] + 10 * target for target in range(size)], async_op=is_async))
    assert all(torch.equal(out, value + 10 * rank) for out, value in zip(outputs, values, strict=True))
    output = torch.zeros(num)
    done(group.reduce_scatter(output, [values[rank] + target for target in range(size)], async_op=is_async))
    assert torch.equal(output, summed + size * rank)
    group.barrier()


@pytest.mark.parametrize("waiting", [[0], [1, 2, 3, 4]], ids=["the first waits", "the others wait"])
def test_members_that_wait_and_members_that_do_not_mix(crew: Crew, waiting: list[int]) -> None:
    crew.run(check_mixed_modes, waiting)


def check_messages(group: Group) -> None:
    rank, size = group.rank, group.size
    if size == 1:
        return
    following, previous = (rank + 1) % size, (rank - 1) % size
    for num in (0, 1, 1_000_000):
        sending = group.send(torch.full((num,), float(rank)), following, async_op=True)
        received = torch.zeros(num)
        group.recv(received, previous)
        sending.wait(30.0)
        assert bool((received == previous).all())
    # Tags are matched in any order, and messages do not disturb collectives.
    handles = [group.send(torch.full((8, 2), rank * 10 + tag), following, tag=tag, async_op=True) for tag in (1, 2, 3)]
    total = torch.ones(1)
    group.all_reduce(total)
    for tag in (3, 1, 2):
        message = torch.zeros((8, 2), dtype=torch.int64)
        group.recv(message, previous, tag=tag)
        assert bool((message == previous * 10 + tag).all())
    for handle in handles:
        handle.wait(30.0)


def test_messages_between_neighbours_in_a_ring(crew: Crew) -> None:
    crew.run(check_messages)


def check_receives_under_way(group: Group) -> None:
    """Posted before anything is sent: each gets the message of its tag, from whom it asked for, or from anybody."""
    rank, size = group.rank, group.size
    if size == 1:
        return
    following, previous = (rank + 1) % size, (rank - 1) % size
    slow, fast = torch.zeros(300_000), torch.zeros(3)
    first = group.recv(slow, previous, tag=1, async_op=True)
    second = group.recv(fast, previous, tag=2, async_op=True)
    group.send(torch.full((3,), float(rank)), following, tag=2)
    second.wait(30.0)
    assert not first.done()
    group.barrier()
    sending = group.send(torch.full((300_000,), float(rank)), following, tag=1, async_op=True)
    first.wait(30.0)
    sending.wait(30.0)
    assert fast[0] == slow[0] == slow[-1] == previous
    found = {}
    if rank == 0:
        for _ in range(size - 1):
            message = torch.zeros(2)
            source = group.recv(message, None, tag=5).source
            found[source] = message.tolist()
        assert found == {source: [source, source] for source in range(1, size)}
    else:
        group.send(torch.full((2,), float(rank)), 0, tag=5)
    group.barrier()


def test_receives_under_way_are_matched_by_tag(crew: Crew) -> None:
    crew.run(check_receives_under_way)


def check_large_messages(group: Group) -> None:
    """From ordinary memory and from the arena, in whole bins and not, read at once and put aside."""
    rank, size = group.rank, group.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    for num in (LARGE_BYTES // 4 - 1, LARGE_BYTES // 4, 5 * BIN_BYTES // 4, 9 * BIN_BYTES // 4 + 3):
        sources = [torch.arange(num) + rank, group.empty((num,), dtype=torch.int64).copy_(torch.arange(num) - rank)]
        handles = [group.send(source, following, tag=tag, async_op=True) for tag, source in enumerate(sources)]
        for tag, expected in ((1, torch.arange(num) - previous), (0, torch.arange(num) + previous)):
            received = torch.zeros(num, dtype=torch.int64)
            group.recv(received, previous, tag=tag)
            assert torch.equal(received, expected)
        for handle in handles:
            handle.wait(30.0)


def test_large_messages(crew: Crew) -> None:
    if len(crew.layout) > 1:  # type: ignore[attr-defined]
        crew.run(check_large_messages)


def check_no_growth(group: Group) -> tuple[int, int]:
    import os

    tensor = group.empty((1000,))
    sizes = []
    for repeat in range(2):
        for _ in range(300):
            group.all_reduce(tensor.zero_())
            group.all_gather([torch.zeros(10) for _ in range(group.size)], torch.zeros(10))
        sizes.append(len(os.listdir("/proc/self/fd")) * 10**9 + group.committed_bytes())
        assert repeat in (0, 1)
    return sizes[0], sizes[1]


def test_descriptors_and_shared_memory_do_not_grow(crew: Crew) -> None:
    for before, after in crew.run(check_no_growth):
        assert after == before


def shared_memory_of(group: Group, num_bytes: int, in_arena: bool) -> int:
    tensor = group.empty((num_bytes // 4,)) if in_arena else torch.zeros(num_bytes // 4)
    for _ in range(5):
        group.all_reduce(tensor.zero_())
    return group.committed_bytes()


@pytest.mark.parametrize("in_arena", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_buffers_and_arena_stay_below_twice_the_tensor(size: int, in_arena: bool) -> None:
    for num_bytes in (1 << 20, 5 << 20):
        with Crew(size) as crew:
            for committed in crew.run(shared_memory_of, num_bytes, in_arena):
                assert committed < 2 * num_bytes
