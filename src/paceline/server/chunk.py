"""Some rows of a table with all that belongs to them, on their way to another table or to a disk."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """`ids` [n] differ; `rows` [n, dim]; `state` by torch's name, [n, dim] or [n, 1] each; `versions` [n] are those of
    the last changes. The tensors are copies: the table may change meanwhile."""

    ids: torch.Tensor
    rows: torch.Tensor
    state: dict[str, torch.Tensor]
    versions: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, mask: torch.Tensor) -> Chunk:
        """The rows where it is true: those of one of several servers."""
        return Chunk(
            ids=self.ids[mask],
            rows=self.rows[mask],
            state={name: value[mask] for name, value in self.state.items()},
            versions=self.versions[mask],
        )
