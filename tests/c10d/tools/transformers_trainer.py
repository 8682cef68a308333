"""The Trainer of Hugging Face Transformers on a small model that is made here, not downloaded."""

from __future__ import annotations

from typing import Any

import numpy
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

from tests.c10d.tools import tool_program

if tool_program.explicit_backend is not None:
    # It asks Accelerate, which takes no name for CPU processes but gloo and mpi, and a group that is there already.
    dist.init_process_group(tool_program.explicit_backend)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, num: int) -> None:
        self.tokens = torch.randint(0, 64, (num, 12), generator=torch.Generator().manual_seed(num))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Death(TrainerCallback):
    def on_step_begin(self, _: Any, state: Any, __: Any, **___: Any) -> None:
        tool_program.may_die(state.global_step)


def accuracy(told: Any) -> dict[str, float]:
    return {"accuracy": float(numpy.mean(told.predictions == told.label_ids)), "num": len(told.label_ids)}


set_seed(7)
module = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
arguments = TrainingArguments(
    output_dir=str(tool_program.folder / "out"),
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=8,
    logging_steps=2,
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    model=module,
    args=arguments,
    train_dataset=Texts(61),
    eval_dataset=Texts(31),
    compute_metrics=accuracy,
    preprocess_logits_for_metrics=lambda scores, _: scores.argmax(-1),
    callbacks=[Death()],
)
trained = trainer.train()
evaluated = trainer.evaluate()
again = trainer.train(resume_from_checkpoint=str(tool_program.folder / "out" / "checkpoint-4"))
tool_program.finish(
    {
        "losses": [trained.training_loss, again.training_loss],
        "evaluated": {name: evaluated[name] for name in ("eval_loss", "eval_accuracy", "eval_num")},
        "weights": list(module.parameters()),
    }
)
