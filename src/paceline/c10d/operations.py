"""The operations of a process group, as torch.distributed calls them: torch's arguments on one side, a `Group` on the
other.

Every operation is put into the group's one sequence. Where the caller waits at once (`async_op=False`) it is done on
the calling thread; else on the group's own, in the order of the calls, and the `TorchWork` tells when. Sends and
receives are beside that sequence: to one peer in order, received by tag.

Tensors are CPU tensors; contiguous ones are used where they lie, others through a copy. Those of a type that the group
does not know are moved as plain bytes.

After a failure every later operation raises the same error until the group is destroyed, or `regroup`ed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.c10d import calling, moves
from paceline.c10d.calling import TorchCall, even_parts, movable, only, only_list, require_dense, split_rows
from paceline.c10d.errors import WrongCall, translated
from paceline.c10d.work import Tensors, TorchWork
from paceline.collective import Group, Handle
from paceline.collective.arguments import check_same, check_tensor
from paceline.collective.reductions import find

# Its stubs have an overload for each form of a call, and nothing of what C++ calls by name.
_Base: Any = dist.ProcessGroup


class Operations(_Base):  # type: ignore[misc]
    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._num_operations = 0

    # -- reductions --------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None) -> TorchWork:
        call, tensor = calling.read(opts, op, timeout=timeout), only("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            if call.op != "sum":
                raise WrongCall(f"all_reduce of sparse tensors adds them up; there is no {call.op!r} for them")
            with translated():
                find("sum", tensor.dtype)
            return self._together(
                "all_reduce", [tensor], call, lambda: moves.all_reduce_sparse(self.group, tensor, call.timeout_s)
            )
        if call.op == "mean" and tensor.dtype in moves.INTEGERS:
            with translated():
                check_tensor("tensor", tensor)
            return self._together(
                "mean of integers", [tensor], call, lambda: moves.all_reduce_mean(self.group, tensor, call.timeout_s)
            )
        return self._start(
            [tensor], lambda: self.group.all_reduce(tensor, call.op, async_op=call.is_async, timeout_s=call.timeout_s)
        )

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> TorchWork:
        call = calling.read(opts)
        with translated():
            for tensor in tensors:
                check_tensor("tensor", require_dense("all_reduce_coalesced", tensor))
                find(call.op, tensor.dtype)
        return self._together(
            "all_reduce_coalesced",
            tensors,
            call,
            lambda: moves.all_reduce_many(self.group, tensors, call.op, call.timeout_s),
        )

    def reduce(
        self, tensors: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> TorchWork:
        call, tensor = calling.read(opts, op, root, timeout), only("reduce", tensors)
        return self._start(
            [tensor],
            lambda: self.group.reduce(tensor, call.root, call.op, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> TorchWork:
        call = calling.read(opts, op, timeout=timeout)
        output, parts = only("reduce_scatter", outputs), only_list("reduce_scatter", inputs)
        return self._start(
            [output],
            lambda: self.group.reduce_scatter(output, parts, call.op, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        call, name = calling.read(opts), "reduce_scatter_tensor"
        with translated():
            for output, tensor in zip(outputs, inputs, strict=True):
                self._check_parts(name, tensor, output)
                _check_memory([output], [tensor])
                find(call.op, output.dtype)

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                moves.reduce_scatter_single(self.group, output, tensor, call.op, call.timeout_s)

        return self._together(name, outputs, call, job)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- moving ------------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0) -> TorchWork:
        call, tensor = calling.read(opts, None, root, timeout), only("broadcast", tensors)
        data = movable(tensor)
        return self._start(
            [tensor],
            lambda: self.group.broadcast(data, call.root, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        call = calling.read(opts, timeout=timeout)
        parts, tensor = only_list("all_gather", outputs), only("all_gather", inputs)
        self._check_list("all_gather", parts, tensor)
        moved, data = [movable(part) for part in parts], movable(tensor)
        return self._start(
            [parts],
            lambda: self.group.all_gather(moved, data, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        """outputs[r] becomes the inputs of rank r."""
        call, name = calling.read(opts), "all_gather_coalesced"
        for parts in outputs:
            if len(parts) != len(inputs):
                raise WrongCall(f"{name}: {len(inputs)} tensors on this rank, room for {len(parts)} of another")
        of_each = [[parts[index] for parts in outputs] for index in range(len(inputs))]
        with translated():
            for parts, tensor in zip(of_each, inputs, strict=True):
                self._check_list(name, parts, tensor)
                _check_memory(parts, [tensor])
                check_same("outputs[rank]", movable(parts[self.group.rank]), "input", movable(tensor))

        def job() -> None:
            for parts, tensor in zip(of_each, inputs, strict=True):
                self.group.all_gather([movable(part) for part in parts], movable(tensor), timeout_s=call.timeout_s)

        return self._together(name, outputs, call, job)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> TorchWork:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> TorchWork:
        call, name = calling.read(opts), "all_gather_into_tensor"
        with translated():
            for output, tensor in zip(outputs, inputs, strict=True):
                self._check_parts(name, output, tensor)
                _check_memory([output], [tensor])

        def job() -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                moves.all_gather_single(self.group, movable(output), movable(tensor), call.timeout_s)

        return self._together(name, outputs, call, job)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def gather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> TorchWork:
        call, tensor = calling.read(opts, None, root, timeout), only("gather", inputs)
        parts = only_list("gather", outputs) if len(outputs) else None
        if parts is not None:
            self._check_list("gather", parts, tensor)
        moved, data = None if parts is None else [movable(part) for part in parts], movable(tensor)
        return self._start(
            [parts or []],
            lambda: self.group.gather(data, moved, call.root, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None, root: int = 0
    ) -> TorchWork:
        call, output = calling.read(opts, None, root, timeout), only("scatter", outputs)
        parts = only_list("scatter", inputs) if len(inputs) else None
        if parts is not None:
            self._check_list("scatter", parts, output)
        moved, data = None if parts is None else [movable(part) for part in parts], movable(output)
        return self._start(
            [output],
            lambda: self.group.scatter(data, moved, call.root, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def alltoall(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        call = calling.read(opts, timeout=timeout)
        arriving, leaving = [movable(tensor) for tensor in outputs], [movable(tensor) for tensor in inputs]
        return self._start(
            outputs,
            lambda: self.group.all_to_all(arriving, leaving, async_op=call.is_async, timeout_s=call.timeout_s),
        )

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> TorchWork:
        call, name = calling.read(opts, timeout=timeout), "all_to_all_single"
        arriving = split_rows(f"{name}, output", output, output_splits, self.group.size)
        leaving = split_rows(f"{name}, input", tensor, input_splits, self.group.size)
        if require_dense(name, output).dtype != require_dense(name, tensor).dtype:
            raise WrongCall(f"{name}: tensors of {output.dtype} and {tensor.dtype}; both must be of one type")
        rank = self.group.rank
        if arriving[rank] != leaving[rank]:
            raise WrongCall(
                f"{name}: rank {rank} keeps {leaving[rank]} elements of its own but has room for {arriving[rank]}"
            )
        with translated():
            _check_memory([output], [tensor])
        return self._together(
            name,
            [output],
            call,
            lambda: moves.all_to_all_single(
                self.group, movable(output), movable(tensor), arriving, leaving, call.timeout_s
            ),
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> TorchWork:
        call = calling.read(opts, timeout=timeout)
        return self._start([], lambda: self.group.barrier(async_op=call.is_async, timeout_s=call.timeout_s))

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As Gloo has it; here every barrier says who did not come, on all ranks."""
        limit_s = calling.seconds(timeout)
        self._start([], lambda: self.group.barrier(async_op=False, timeout_s=limit_s))

    # -- messages ----------------------------------------------------------------------------------------------------

    def send(self, tensors: Any, rank: int, tag: int = 0) -> TorchWork:
        tensor = require_dense("send", only("send", tensors))
        data = movable(tensor)
        return self._start([tensor], lambda: self.group.send(data, rank, tag=tag, async_op=True))

    def recv(self, tensors: Any, rank: int, tag: int = 0) -> TorchWork:
        return self._receive(tensors, rank, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> TorchWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, rank: int | None, tag: int) -> TorchWork:
        tensor = require_dense("recv", only("recv", tensors))
        data = movable(tensor)
        return self._start([tensor], lambda: self.group.recv(data, rank, tag=tag, async_op=True))

    # -- inside ------------------------------------------------------------------------------------------------------

    def _start(self, tensors: Tensors, start: Callable[[], Handle]) -> TorchWork:
        self._num_operations += 1
        with translated():
            return TorchWork(start(), tensors)

    def _together(self, name: str, tensors: Tensors, call: TorchCall, job: Callable[[], None]) -> TorchWork:
        return self._start(tensors, lambda: self.group.together(name, job, async_op=call.is_async))

    def _check_list(self, name: str, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        require_dense(name, tensor)
        if len(parts) != self.group.size:
            raise WrongCall(f"{name}: {len(parts)} tensors for a group of {self.group.size}; give one for each rank")
        for part in parts:
            if require_dense(name, part).dtype != tensor.dtype:
                raise WrongCall(f"{name}: tensors of {part.dtype} and {tensor.dtype}; all must be of one type")

    def _check_parts(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> None:
        require_dense(name, whole)
        require_dense(name, part)
        if whole.dtype != part.dtype:
            raise WrongCall(f"{name}: tensors of {whole.dtype} and {part.dtype}; both must be of one type")
        if even_parts(name, whole, self.group.size) != part.numel():
            raise WrongCall(
                f"{name}: a tensor of {whole.numel()} elements for {self.group.size} ranks goes with one of "
                f"{whole.numel() // self.group.size}, not of {part.numel()}"
            )


def _check_memory(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> None:
    """Before several operations as one, which would find out after the first of them."""
    for tensor in written:
        check_tensor("output", movable(tensor))
    for tensor in read:
        check_tensor("input", movable(tensor), writes=False)
