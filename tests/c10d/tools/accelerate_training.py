"""A training loop with Accelerate: accumulated and clipped gradients, a schedule, metrics of an uneven set, states."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader

from tests.c10d.tools import tool_program

if tool_program.explicit_backend is not None:
    # Accelerate takes no name for CPU processes but gloo and mpi, and a group that is there already.
    dist.init_process_group(tool_program.explicit_backend)


def prepared(accelerator: Accelerator) -> list[Any]:
    set_seed(7)
    module = tool_program.model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    loaders = [
        DataLoader(tool_program.samples(64), batch_size=6, shuffle=True),
        DataLoader(tool_program.samples(31, 1), batch_size=4),
    ]
    return list(accelerator.prepare(module, optimizer, schedule, *loaders))


def train(accelerator: Accelerator) -> dict[str, Any]:
    module, optimizer, schedule, training, evaluation = prepared(accelerator)
    losses: list[torch.Tensor] = []
    for epoch in range(2):
        for step, (features, classes) in enumerate(training):
            tool_program.may_die(epoch * len(training) + step)
            with accelerator.accumulate(module):
                loss = nn.functional.cross_entropy(module(features), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()))
    module.eval()
    guesses = []
    for features, classes in evaluation:
        with torch.no_grad():
            guessed = module(features).argmax(1)
        guesses.append(accelerator.gather_for_metrics((guessed, classes)))
    place = str(tool_program.folder / "state")
    accelerator.save_state(place)
    accelerator.save_model(module, str(tool_program.folder / "model"))
    accelerator.wait_for_everyone()  # the main process writes; Accelerate lets the others go on
    weights = [parameter.clone() for parameter in module.parameters()]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    accelerator.load_state(place)
    restored = [torch.equal(one, other) for one, other in zip(weights, module.parameters(), strict=True)]
    return {"losses": losses, "guesses": guesses, "weights": weights, "restored": restored}


def train_on_uneven_inputs(accelerator: Accelerator) -> list[torch.Tensor]:
    module, optimizer, _, training, _ = prepared(accelerator)
    with accelerator.join_uneven_inputs([module], even_batches=False):
        for features, classes in training:
            accelerator.backward(nn.functional.cross_entropy(module(features), classes))
            optimizer.step()
            optimizer.zero_grad()
    return list(module.parameters())


results = train(Accelerator(cpu=True, gradient_accumulation_steps=2))
results["uneven"] = train_on_uneven_inputs(Accelerator(cpu=True))
# The main process reads the batches and hands them to the others.
dispatching = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
results["dispatched"] = [[features, classes] for features, classes in prepared(dispatching)[3]]
tool_program.finish(results)
