"""Our backend where a script asks for Gloo or leaves it open, in the default group and in those made later. Other
backends stay as written."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Backend

from paceline.c10d.options import Options
from paceline.c10d.process_group import NAME, ProcessGroup


def with_our_backend(
    make_group: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call torch's own function with, by which it makes every group."""
    bound = inspect.signature(make_group).bind(*arguments, **named)
    if "backend" not in bound.arguments:
        raise RuntimeError(
            f"--backend {NAME}: torch {torch.__version__} makes its groups in another way than this Paceline knows; "
            "run the script without --backend"
        )
    if _is_for_us(str(bound.arguments["backend"])):
        bound.arguments["backend"] = Backend(NAME)
        if not isinstance(bound.arguments.get("backend_options"), Options):
            bound.arguments["backend_options"] = None  # Gloo's own
    return bound.args, bound.kwargs


def our_group(group: Any) -> ProcessGroup | None:
    """The group that a call means, if it is one of ours."""
    found = dist.group.WORLD if group is None else group
    return found if isinstance(found, ProcessGroup) else None


def _is_for_us(backend: str) -> bool:
    if backend == "undefined":  # torch would choose for each device
        return not torch.accelerator.is_available()
    return backend in ("gloo", "cpu:gloo")
