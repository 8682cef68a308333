"""What `paceline bench SCRIPT` wants to know of a session beside its spans, so that it can say what to change."""

from __future__ import annotations

import torch

from paceline.train.parts import TrainingParts
from paceline.watch import spans


def begin_recording(parts: TrainingParts) -> None:
    """Nothing, where nobody asked for a recording."""
    if not spans.is_wanted():
        return
    options, optimizers = parts.options, parts.optimizers
    spans.begin(
        {
            "strategy": options.strategy,
            "is_leased": options.mode.is_leased,
            "global_batch": parts.batches.global_batch,
            "parameter_bytes": sum(parameter.nbytes for parameter in parts.model.parameters()),
            "optimizers": ", ".join(type(optimizer).__name__ for optimizer in optimizers),
            # Those of torch that have a fused form, and do not use it.
            "can_be_fused": any(optimizer.defaults.get("fused", True) is None for optimizer in optimizers),
            "loader_workers": options.loader.num_workers,
            "threads": torch.get_num_threads(),
        }
    )
