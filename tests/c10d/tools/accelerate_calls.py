"""What Accelerate has processes say to each other, one by one; a hook of DDP, and local SGD."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    DDPCommunicationHookType,
    broadcast,
    broadcast_object_list,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
)
from torch import nn
from torch.utils.data import DataLoader

from tests.c10d.tools import tool_program

if tool_program.explicit_backend is not None:
    dist.init_process_group(tool_program.explicit_backend)


def calls(accelerator: Accelerator) -> dict[str, Any]:
    rank = accelerator.process_index
    mine = torch.arange(4.0).view(2, 2) + rank
    uneven = torch.full((rank + 1, 2), float(rank))
    with accelerator.split_between_processes(list(range(7)), apply_padding=True) as part:
        share = part
    with accelerator.main_process_first():
        accelerator.wait_for_everyone()
    if rank == 1:
        accelerator.set_trigger()
    return {
        "gather": gather({"a": mine, "b": [mine.to(torch.int64), mine > 1]}),
        "gather scalar": gather(torch.tensor(float(rank))),
        "gather objects": gather_object([{"rank": rank}]),
        "broadcast": broadcast(mine.clone(), 1),
        "broadcast objects": broadcast_object_list([rank, {"rank": rank}], from_process=1),
        "pad": pad_across_processes(uneven, pad_index=-1),
        "gather uneven": accelerator.gather_for_metrics(["text"] * (rank + 1), use_gather_object=True),
        "sum": reduce(mine.clone(), "sum"),
        "mean": accelerator.reduce(mine.clone(), "mean"),
        "share": share,
        "trigger": accelerator.check_trigger(),
    }


def train(accelerator: Accelerator, local_steps: int | None = None) -> list[torch.Tensor]:
    module = tool_program.model(has_statistics=False)
    prepared: Any = accelerator.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1),
        DataLoader(tool_program.samples(48), batch_size=4),
    )
    wrapped, optimizer, loader = prepared
    is_local = local_steps is not None
    with LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=local_steps or 1, enabled=is_local) as local:
        for step, (features, classes) in enumerate(loader):
            tool_program.may_die(step)
            accelerator.backward(nn.functional.cross_entropy(wrapped(features), classes))
            optimizer.step()
            optimizer.zero_grad()
            local.step()
    return list(accelerator.get_state_dict(wrapped).values())


results = calls(Accelerator(cpu=True))
halved = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
# Sums of halves depend on their order: they are compared with as little precision.
results["hook"] = [one.to(torch.bfloat16) for one in train(Accelerator(cpu=True, kwargs_handlers=[halved]))]
results["local SGD"] = train(Accelerator(cpu=True), local_steps=3)
tool_program.finish(results)
