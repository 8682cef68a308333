"""How a batch is read without fetching its samples one by one, where the same comes out; default_collate only.

Rows      of a TensorDataset, of a plain tensor, or of a Subset of these are taken by their indices. Exactly these
          types: a subclass may have a `__getitem__` of its own.
Items     of a dataset with `__getitems__`, which torch's DataLoader calls too, are asked for together. Whether these
          are its samples is not taken on trust. The first batch of each epoch is read both ways and compared. And none
          may draw from the global random generators: a sample that does must do so under random numbers of its own,
          so it is fetched alone. A dataset that was found out once is not asked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from paceline.data.dataset import digest
from paceline.data.seeding import generator_states, generators_kept, have_drawn

Indices = Sequence[int] | npt.NDArray[np.int64]
_MOST_DIMENSIONS = 4  # of tensors that are stacked as index_select lays them out, whatever their strides


def reads_rows(dataset: Any) -> bool:
    """Whether `read_rows` may be tried."""
    return type(dataset) in (TensorDataset, torch.Tensor) or (type(dataset) is Subset and reads_rows(dataset.dataset))


def read_rows(dataset: Any, indices: Indices) -> Any:
    """What default_collate makes of these samples; None where it may make something else."""
    if type(dataset) is Subset:
        chosen = dataset.indices
        return read_rows(dataset.dataset, [int(chosen[index]) for index in indices])
    # A copy, because torch warns of arrays that must not be written.
    at = torch.from_numpy(np.array(indices, dtype=np.int64))
    tensors = dataset.tensors if type(dataset) is TensorDataset else (dataset,)
    if not all(map(_is_plain, tensors)):
        return None
    try:
        # Not tensor[at], which wakes other threads for a few kilobytes and waits for them.
        rows = [tensor.index_select(0, at) for tensor in tensors]
    except IndexError:  # negative ones are right for a sample, and what is outside is told by it
        return None
    return rows if type(dataset) is TensorDataset else rows[0]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and (tensor.ndim <= _MOST_DIMENSIONS or _is_laid_out_plainly(tensor))
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_laid_out_plainly(tensor: torch.Tensor) -> bool:
    """Also in dimensions of size 1, whose strides `is_contiguous` ignores, and by which stacking guesses a layout."""
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()


class ItemReader:
    """`__getitems__` of a dataset, as long as it gives what the samples give."""

    def __init__(self, get: Callable[[list[int]], Sequence[Any]]) -> None:
        self._get = get
        self._epoch = -1  # of which a batch was compared
        self._is_refuted = False

    def read(self, epoch: int, indices: Indices) -> Any:
        """The batch of these samples; None where they must be fetched one by one."""
        return self._try(indices) if epoch == self._epoch and not self._is_refuted else None

    def compare(self, epoch: int, indices: Indices, batch: Any) -> None:
        """These samples, one by one, gave this batch."""
        if epoch == self._epoch or self._is_refuted:
            return
        found = self._try(indices)
        self._is_refuted = found is None or digest(found) != digest(batch)
        self._epoch = epoch

    def _try(self, indices: Indices) -> Any:
        with generators_kept():
            before = generator_states()
            try:
                samples = self._get([int(index) for index in indices])
                if len(samples) == len(indices) and not have_drawn(before):
                    return default_collate(list(samples))
            except Exception:  # whichever sample raises it does so when it is fetched alone, and is named
                pass
        self._is_refuted = True
        return None
