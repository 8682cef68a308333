"""Buffers of a model, such as the running statistics of BatchNorm, which a forward pass changes.

An attempt at a step must leave no trace, and every worker must end with the same buffers. So what an attempt changed
is taken aside (`StagedBuffers`) and the buffers are put back at once; when the step is applied, floating buffers become
the mean over workers weighted by samples, and integer ones (num_batches_tracked) the highest over workers.

Which buffers changed is told by their version, and for normalisation layers, which write past the version, by their
mode. Ranks compare a digest of that set in the header; only where it differs, as when a rank without samples ran no
forward, do they exchange the set itself. Constant buffers are neither copied in each step nor averaged.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from paceline.collective import Group
from paceline.strategy import digests


@dataclass(frozen=True, eq=False)
class StagedBuffers:
    """New values by number of the buffer."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    digest: int = 0


class _Entry:
    """One buffer, as it is when no attempt is under way, and a copy of its values."""

    def __init__(self, module: torch.nn.Module, key: str, tensor: torch.Tensor) -> None:
        self._module = module
        self._key = key
        self.tensor = tensor
        self._saved = tensor.detach().clone()
        self._version = tensor._version
        self._is_statistic = isinstance(module, _NormBase)

    def save(self) -> None:
        current = self._module._buffers.get(self._key)
        if current is None:
            return
        if current is not self.tensor or current.shape != self._saved.shape or current.dtype != self._saved.dtype:
            self.tensor, self._saved = current, current.detach().clone()
        elif self._is_statistic or current._version != self._version:
            self._saved.copy_(current.detach())
        self._version = self.tensor._version

    def is_touched(self) -> bool:
        return self._module._buffers.get(self._key) is not self.tensor or self.tensor._version != self._version

    def is_counted(self) -> bool:
        """A normalisation layer in training mode changes its statistics in each forward, on every rank alike."""
        module = self._module
        return self._is_statistic and module.training and bool(module.track_running_stats)

    def current(self) -> torch.Tensor:
        return self._module._buffers[self._key] if self.is_touched() else self.tensor  # type: ignore[return-value]

    def restore(self) -> None:
        if self._is_statistic or self.is_touched():
            self._module._buffers[self._key] = self.tensor
            self.tensor.copy_(self._saved)
            self._version = self.tensor._version


class ModelBuffers:
    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._modules = dict(modules)
        self._entries: list[_Entry] = []

    def refresh(self) -> None:
        """Find the buffers that there are now."""
        seen: set[int] = set()
        self._entries = []
        for root in self._modules.values():
            for module in root.modules():
                for key, tensor in module._buffers.items():
                    if tensor is not None and id(tensor) not in seen:
                        seen.add(id(tensor))
                        self._entries.append(_Entry(module, key, tensor))

    def has_batch_statistics(self) -> bool:
        return any(isinstance(module, _BatchNorm) for root in self._modules.values() for module in root.modules())

    def tensors(self) -> list[torch.Tensor]:
        return [entry.tensor for entry in self._entries]

    def attempt(self) -> contextlib.AbstractContextManager[Callable[[], StagedBuffers]]:
        """Whatever happens to buffers in here is undone at the end; call what this yields to keep the new values."""
        return self._attempt() if self._entries else contextlib.nullcontext(self._stage)

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[Callable[[], StagedBuffers]]:
        with torch.no_grad():
            for entry in self._entries:
                entry.save()
        try:
            yield self._stage
        finally:
            with torch.no_grad():
                for entry in self._entries:
                    entry.restore()

    def _stage(self) -> StagedBuffers:
        changed = [
            (number, entry) for number, entry in enumerate(self._entries) if entry.is_counted() or entry.is_touched()
        ]
        values = {number: entry.current().detach().clone() for number, entry in changed}
        return StagedBuffers(values, digests.of_set(values) if values else 0)

    def expected(self) -> StagedBuffers:
        """What a rank that runs no forward stages: the set that the others will most likely name, with its own values,
        which count for nothing."""
        values = {number: entry.tensor for number, entry in enumerate(self._entries) if entry.is_counted()}
        return StagedBuffers(values, digests.of_set(values) if values else 0)

    @torch.no_grad()
    def reduce(self, group: Group, staged: StagedBuffers, is_same_set: bool, fraction: float) -> StagedBuffers:
        """The buffers that all will hold. `fraction` is this worker's part of the global batch."""
        numbers = sorted(staged.values)
        if not is_same_set:
            bitmap = torch.zeros(len(self._entries), dtype=torch.int64)
            bitmap[numbers] = 1
            group.all_reduce(bitmap, "max")
            numbers = bitmap.nonzero().flatten().tolist()
        mine = {number: staged.values.get(number, self._entries[number].tensor) for number in numbers}
        by_type: dict[torch.dtype, list[int]] = {}
        for number, value in mine.items():
            by_type.setdefault(_wide(value.dtype), []).append(number)
        agreed: dict[int, torch.Tensor] = {}
        for dtype, these in by_type.items():
            flat = torch.cat([mine[number].reshape(-1).to(dtype) for number in these])
            if dtype == torch.int64:
                group.all_reduce(flat, "max")
            else:
                group.all_reduce(flat.mul_(fraction) if fraction > 0 else flat.zero_())
            parts = torch.split(flat, [mine[number].numel() for number in these])
            agreed |= {number: part.view(mine[number].shape) for number, part in zip(these, parts, strict=True)}
        return StagedBuffers(agreed)

    def commit(self, staged: StagedBuffers) -> None:
        if staged.values:
            self._take_over(staged)

    @torch.no_grad()
    def _take_over(self, staged: StagedBuffers) -> None:
        for number, value in staged.values.items():
            tensor = self._entries[number].tensor
            if tensor.shape != value.shape:
                tensor.resize_(value.shape)
            tensor.copy_(value)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which buffers are added up."""
    if dtype.is_complex:
        return torch.complex128
    if not dtype.is_floating_point:
        return torch.int64
    return torch.float64 if dtype == torch.float64 else torch.float32
