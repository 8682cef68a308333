"""Some rows of a table with all that belongs to them, on their way to another table or to a disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Chunk:
    """`ids` [n] differ; `rows` [n, dim]; `state` by torch's name, [n, dim] or [n, 1] each; `idle` [n] is for how many
    updates each was not touched, where that is counted. The tensors are copies: the table may change meanwhile."""

    ids: torch.Tensor
    rows: torch.Tensor
    state: dict[str, torch.Tensor]
    idle: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, mask: torch.Tensor) -> Chunk:
        """The rows where it is true: those of one of several servers."""
        return Chunk(
            ids=self.ids[mask],
            rows=self.rows[mask],
            state={name: value[mask] for name, value in self.state.items()},
            idle=self.idle[mask] if self.idle is not None else None,
        )


@dataclass(frozen=True)
class WaitingChunkIds:
    """Ids that have no row yet: how often each was seen, and how many updates ago."""

    ids: torch.Tensor
    counts: torch.Tensor
    idle: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, mask: torch.Tensor) -> WaitingChunkIds:
        return WaitingChunkIds(self.ids[mask], self.counts[mask], self.idle[mask])


def joined_waiting(parts: Sequence[WaitingChunkIds]) -> WaitingChunkIds | None:
    """Of several servers; None of none."""
    if not parts:
        return None
    return WaitingChunkIds(
        torch.cat([one.ids for one in parts]),
        torch.cat([one.counts for one in parts]),
        torch.cat([one.idle for one in parts]),
    )
