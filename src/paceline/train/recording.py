"""What `paceline bench SCRIPT` wants to know of a session beside its spans, so that it can say what to change."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from paceline.strategy.options import SessionOptions
from paceline.watch import spans


def begin_recording(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], options: SessionOptions, global_batch: int
) -> None:
    """Nothing, where nobody asked for a recording."""
    if not spans.is_wanted():
        return
    parameters = list(model.parameters())
    spans.begin(
        {
            "strategy": options.strategy,
            "is_leased": options.mode.is_leased,
            "global_batch": global_batch,
            "parameter_bytes": sum(parameter.nbytes for parameter in parameters),
            "optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
            # Those of torch that have a fused form, and do not use it.
            "can_be_fused": any(optimizer.defaults.get("fused", True) is None for optimizer in optimizers),
            "loader_workers": options.loader.num_workers,
            "threads": torch.get_num_threads(),
        }
    )
