"""Which tensors are trained, in one order with one name each, the same on all workers.

The order is that of registration in the modules, then what only the optimizers know. A parameter under two names
(tied weights) is one parameter, with its first name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.checkpoint.weights import plain_name
from paceline.nn.embedding import Table, tables_in

Modules = torch.nn.Module | Sequence[torch.nn.Module] | Mapping[str, torch.nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def named_modules(modules: Modules) -> dict[str, torch.nn.Module]:
    """By prefix; a single module has none."""
    if isinstance(modules, torch.nn.Module):
        return {"": modules}
    if isinstance(modules, Mapping):
        return {f"{name}.": module for name, module in modules.items()}
    return {f"{number}.": module for number, module in enumerate(modules)}


def listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def collect(
    modules: Mapping[str, torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, torch.Tensor]:
    """Every distinct parameter by name, frozen ones too."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()

    def add(name: str, parameter: torch.Tensor) -> None:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            found[name] = parameter

    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            add(prefix + plain_name(name), parameter)
    for number, optimizer in enumerate(optimizers):
        for group_number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                add(f"optimizer {number}, group {group_number}, parameter {position}", parameter)
    return found


def named_tables(modules: Mapping[str, torch.nn.Module]) -> dict[str, Table]:
    """The tables of the modules, by name. Two of one name would be one table with two sets of settings."""
    found: dict[str, Table] = {}
    for prefix, module in modules.items():
        for name, table in tables_in(module):
            whole = name if table.table_name else prefix + name
            if whole in found and found[whole] is not table:
                raise ValueError(
                    f"two tables are called {whole!r}; give each a name of its own, or use one module twice"
                )
            found[whole] = table
    return found
