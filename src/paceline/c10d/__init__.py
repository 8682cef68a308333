"""Paceline's group as a backend of torch.distributed. Importing this registers it, for CPU tensors:

    import paceline.c10d
    torch.distributed.init_process_group("paceline")

From there on DDP, FSDP2, DTensor, pipelining, distributed checkpoints and object collectives run on it. See
docs/how-to/torch-distributed.md, and ARCHITECTURE.md, "torch.distributed".
"""

from __future__ import annotations

from paceline.c10d.errors import Aborted, OutOfMemory, TimedOut, TorchMismatch, TorchPeerLost, Unreachable, WrongCall
from paceline.c10d.options import Options
from paceline.c10d.process_group import ProcessGroup
from paceline.c10d.registering import register
from paceline.c10d.regrouping import regroup
from paceline.store.torch_store import StoreFailed

__all__ = [
    "Aborted",
    "Options",
    "OutOfMemory",
    "ProcessGroup",
    "StoreFailed",
    "TimedOut",
    "TorchMismatch",
    "TorchPeerLost",
    "Unreachable",
    "WrongCall",
    "regroup",
]

register()
