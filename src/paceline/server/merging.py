"""Gradients of rows from several places, added up by id."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def merged(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Each id once, with the sum of its gradients, in the order given."""
    if len(pairs) == 1:
        return pairs[0]
    ids, inverse = torch.unique(torch.cat([ids for ids, _ in pairs]), return_inverse=True)
    gradients = torch.cat([values for _, values in pairs])
    total = torch.zeros((len(ids), gradients.shape[1]), dtype=gradients.dtype)
    return ids, total.index_add_(0, inverse, gradients)
