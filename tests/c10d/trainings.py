"""What people do with torch.distributed, small, on one process group; each returns what came out, to be compared."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

WIDTH = 12


def model(*, has_statistics: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(WIDTH) if has_statistics else nn.Identity()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), middle, nn.ReLU(), nn.Linear(WIDTH, 24))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def train(module: nn.Module, rank: int, num_steps: int = 3) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = module(batch(rank, step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(whole(parameter) for parameter in module.parameters())]


def ddp(group: ProcessGroup) -> Any:
    results = []
    for is_view in (False, True):
        wrapped = DistributedDataParallel(
            model(has_statistics=True), process_group=group, gradient_as_bucket_view=is_view, bucket_cap_mb=0.001
        )
        results += train(wrapped, group.rank())
    return results


def ddp_with_unused_and_accumulated(group: ProcessGroup) -> Any:
    module = model()
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    wrapped = DistributedDataParallel(module, process_group=group, find_unused_parameters=True)
    with wrapped.no_sync():
        wrapped(batch(group.rank(), 0)).sum().backward()
    wrapped(batch(group.rank(), 1)).sum().backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def ddp_on_uneven_inputs(group: ProcessGroup) -> Any:
    wrapped = DistributedDataParallel(model(), process_group=group)
    with wrapped.join():
        return train(wrapped, group.rank(), num_steps=2 + group.rank())[-4:]


def mesh_of(group: ProcessGroup, name: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))


def fsdp(group: ProcessGroup) -> Any:
    module, mesh = model(), mesh_of(group, "data")
    for layer in (module[0], module[3]):
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return train(module, group.rank())


def tensor_parallel(group: ProcessGroup) -> Any:
    mesh = mesh_of(group, "tensor")
    module = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})
    return train(module, 0)


def distributed_tensors(group: ProcessGroup) -> Any:
    mesh = mesh_of(group, "rows")
    rows = distribute_tensor(torch.arange(48.0).view(6, 8), mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    product: Any = columns @ distribute_tensor(torch.arange(32.0).view(8, 4), mesh, [Shard(0)])
    return [columns.to_local(), whole(product), product.redistribute(mesh, [Replicate()]).to_local()]


def pipeline(group: ProcessGroup) -> Any:
    """A stage on each of the first two ranks; the rest has nothing to do."""
    rank = group.rank()
    layers = model()
    stages = [nn.Sequential(layers[0], layers[1]), nn.Sequential(layers[2], layers[3])]
    stage = PipelineStage(stages[rank], rank, group.size(), torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=lambda output, target: (output - target).square().mean())
    if rank == 0:
        schedule.step(batch(0, 0))
    else:
        schedule.step(target=torch.ones(6, 24))
    return [parameter.grad for parameter in stages[rank].parameters()]


def checkpoint(group: ProcessGroup) -> Any:
    """Written by all ranks, read back by all."""
    names = [tempfile.mkdtemp(prefix="paceline-dcp-") if group.rank() == 0 else ""]
    dist.broadcast_object_list(names, dist.get_global_rank(group, 0), group=group)
    mesh = mesh_of(group, "rows")
    state = {"weight": distribute_tensor(torch.arange(12.0).view(6, 2), mesh, [Shard(0)]), "step": 7}
    save(state, checkpoint_id=names[0], process_group=group)
    empty: dict[str, Any] = {"weight": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0)]), "step": 0}
    load(empty, checkpoint_id=names[0], process_group=group)
    files = sorted(path.name for path in Path(names[0]).iterdir())
    dist.barrier(group)
    if group.rank() == 0:
        shutil.rmtree(names[0])
    return [whole(empty["weight"]), empty["step"], files]


def subgroups(group: ProcessGroup) -> Any:
    """New groups over parts of the world, on the backend of the given one, in any order; then one is destroyed."""
    backend, results = dist.get_backend(group), []
    for ranks in ([0], [1, 0], [1]):
        part = dist.new_group(ranks, backend=backend, timeout=None)
        if group.rank() in ranks:
            tensor = torch.full((3,), group.rank() + 1.0)
            dist.all_reduce(tensor, group=part)
            results.append(tensor)
            dist.destroy_process_group(part)
    return results


EVERY = [
    ddp,
    ddp_with_unused_and_accumulated,
    ddp_on_uneven_inputs,
    fsdp,
    tensor_parallel,
    distributed_tensors,
    pipeline,
    checkpoint,
    subgroups,
]
