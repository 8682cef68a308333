"""Lightning's Trainer with DDP: synchronised logs and metrics, checkpoints, prediction, gathered tensors."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from tests.c10d.tools import tool_program


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = tool_program.model()
        self.accuracy = MulticlassAccuracy(tool_program.NUM_CLASSES)
        self.confusion = MulticlassConfusionMatrix(tool_program.NUM_CLASSES)
        self.gathered: list[Any] = []

    def prepare_data(self) -> None:
        (tool_program.folder / "prepared").touch()

    def setup(self, stage: str) -> None:
        assert (tool_program.folder / "prepared").exists()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        tool_program.may_die(self.global_step)
        features, classes = batch
        loss = nn.functional.cross_entropy(self.layers(features), classes)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("samples", torch.tensor(len(features)), sync_dist=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        features, classes = batch
        scores = self.layers(features)
        self.accuracy(scores, classes)
        self.confusion.update(scores, classes)
        self.log("accuracy", self.accuracy)
        self.log("validation", nn.functional.cross_entropy(scores, classes), sync_dist=True)
        self.log("highest", scores.max(), sync_dist=True, reduce_fx="max")
        self.gathered.append(self.all_gather({"classes": classes, "first": scores[0]}))

    def on_validation_epoch_end(self) -> None:
        self.gathered.append(self.confusion.compute())
        self.confusion.reset()

    def predict_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        scores: torch.Tensor = self.layers(batch[0])
        return scores

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tool_program.samples(64), batch_size=6, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tool_program.samples(31, 1), batch_size=4)

    def predict_dataloader(self) -> DataLoader[Any]:
        return DataLoader(tool_program.samples(31, 2), batch_size=4)


def trainer(num_epochs: int) -> lightning.Trainer:
    backend = tool_program.explicit_backend
    return lightning.Trainer(
        accelerator="cpu",
        devices=tool_program.num_processes,
        strategy=DDPStrategy(process_group_backend=backend) if backend else "ddp",
        max_epochs=num_epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(monitor="validation", save_last=True), EarlyStopping("validation", patience=5)],
        default_root_dir=tool_program.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


lightning.seed_everything(7)
module, first = Classifier(), trainer(2)
first.fit(module)
results: dict[str, Any] = {"metrics": dict(first.callback_metrics), "gathered": list(module.gathered)}
again = trainer(3)
again.fit(Classifier(), ckpt_path=str(tool_program.folder / "checkpoints" / "last.ckpt"))
strategy: Any = again.strategy
results |= {
    "environment": type(strategy.cluster_environment).__name__,
    "resumed": dict(again.callback_metrics),
    "validated": again.validate(module, ckpt_path="best", verbose=False),
    "predicted": again.predict(module),
    "mean of integers": strategy.reduce(torch.tensor(7 + again.global_rank), reduce_op="mean"),
    "broadcast": strategy.broadcast({"rank": again.global_rank}, src=1),
    "anybody": strategy.reduce_boolean_decision(again.global_rank == 1, all=False),
    "weights": list(module.parameters()),
}
tool_program.finish(results)
