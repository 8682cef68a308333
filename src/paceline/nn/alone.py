"""The rows of a module that no session has taken up: the initial ones, which nobody updates."""

from __future__ import annotations

import torch

from paceline.nn.embedding import Table
from paceline.server.initial import InitialRows
from paceline.server.spec import TableSpec


class OwnRows:
    def rows(self, table: Table, ids: torch.Tensor) -> torch.Tensor:
        spec = TableSpec(
            name=table.table_name or "table",
            dim=table.dim,
            dtype=str(table.weight.dtype).removeprefix("torch."),  # type: ignore[arg-type]
            init=table.init,
            scale=table.scale,
        )
        return InitialRows(spec).of(ids).requires_grad_(torch.is_grad_enabled())
