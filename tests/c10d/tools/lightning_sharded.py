"""Lightning's Fabric with DDP, and its ModelParallelStrategy (FSDP2) in Fabric and Trainer, with checkpoints."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from tests.c10d.tools import tool_program

backend = tool_program.explicit_backend
given: dict[str, Any] = {"process_group_backend": backend} if backend else {}
cpus: dict[str, Any] = {"accelerator": "cpu", "devices": tool_program.num_processes}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def train(fabric: lightning.Fabric, module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    loader = fabric.setup_dataloaders(DataLoader(tool_program.samples(48), batch_size=4))
    losses = []
    for step, (features, classes) in enumerate(loader):
        tool_program.may_die(step)
        with fabric.no_backward_sync(module, enabled=step % 2 == 0):
            loss = nn.functional.cross_entropy(module(features), classes)
            fabric.backward(loss)
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(fabric.all_reduce(loss.detach(), reduce_op="mean"))
    return losses


def with_ddp() -> dict[str, Any]:
    fabric = lightning.Fabric(strategy=FabricDDPStrategy(**given), **cpus)
    fabric.launch()
    module = tool_program.model()
    wrapped, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
    losses = train(fabric, wrapped, optimizer)
    place = tool_program.folder / "fabric.ckpt"
    fabric.save(place, {"module": wrapped, "step": 3})
    with fabric.rank_zero_first():
        assert place.exists()
    rest = fabric.load(place, {"module": wrapped})
    return {
        "losses": losses,
        "weights": list(module.parameters()),
        "step": rest["step"],
        "broadcast": fabric.broadcast({"rank": fabric.global_rank}, src=1),
        "gather": fabric.all_gather({"rank": torch.tensor([fabric.global_rank])}),
    }


def with_shards() -> dict[str, Any]:
    fabric = lightning.Fabric(
        strategy=FabricModelParallelStrategy(
            shard, data_parallel_size=tool_program.num_processes, tensor_parallel_size=1, **given
        ),
        **cpus,
    )
    fabric.launch()
    module = fabric.setup(tool_program.model(has_statistics=False))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(module.parameters(), lr=0.01))
    losses = train(fabric, module, optimizer)
    before = [whole(parameter).clone() for parameter in module.parameters()]
    place = tool_program.folder / "shards"
    fabric.save(place, {"module": module, "optimizer": optimizer})
    fabric.load(place, {"module": module, "optimizer": optimizer})
    return {"losses": losses, "before": before, "after": [whole(parameter) for parameter in module.parameters()]}


class Sharded(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tool_program.model(has_statistics=False)

    def configure_model(self) -> None:
        if not isinstance(next(self.layers.parameters()), DTensor):
            shard(self.layers, self.device_mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tool_program.samples(48), batch_size=4)


def with_trainer() -> dict[str, Any]:
    module = Sharded()
    trainer = lightning.Trainer(
        strategy=ModelParallelStrategy(
            data_parallel_size=tool_program.num_processes,
            tensor_parallel_size=1,
            save_distributed_checkpoint=True,
            **given,
        ),
        max_epochs=1,
        default_root_dir=tool_program.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **cpus,
    )
    trainer.fit(module)
    return {"metrics": dict(trainer.callback_metrics), "weights": [whole(one) for one in module.parameters()]}


lightning.seed_everything(7)
tool_program.finish({"ddp": with_ddp(), "shards": with_shards(), "trainer": with_trainer()})
