"""Short numbers that are equal when two workers hold the same, and, where they are not, what differs.

Nothing here depends on a process: no addresses, no hash seeds.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from paceline.wire.dtypes import raw_bytes

_SAMPLED = 64  # elements of each parameter


def of_text(text: str) -> int:
    """63 bits, never 0."""
    return (int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1) or 1


def of_set(members: Iterable[int]) -> int:
    return of_text(",".join(map(str, members)))


class HyperParameters:
    """Settings, and everything in the optimizers' groups that is not a parameter: learning rates and their like."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
        self._optimizers = optimizers
        self._settings = dict(settings)
        self._seen: list[Any] = []
        self._fixed: list[Any] = []  # the values themselves, if none of them can change by itself, as a tensor can
        self._digest = 0

    def digest(self) -> int:
        """Computed anew only when a value changed, as a schedule does."""
        given = [
            value
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for key, value in group.items()
            if key != "params"
        ]
        if self._fixed and len(given) == len(self._fixed) and all(map(operator.is_, given, self._fixed)):
            return self._digest
        values = [_plain(value) for value in given]
        self._fixed = given if all(map(_is_fixed, given)) else []
        if values != self._seen or not self._digest:
            self._seen = values
            self._digest = of_text("\n".join(f"{name} = {value}" for name, value in self.entries().items()))
        return self._digest

    def entries(self) -> dict[str, str]:
        found = {name: repr(value) for name, value in self._settings.items()}
        for number, optimizer in enumerate(self._optimizers):
            for group_number, group in enumerate(optimizer.param_groups):
                where = f"of {type(optimizer).__name__} {number}, group {group_number}"
                for key in sorted(group, key=str):
                    if key == "params":
                        found[f"the number of parameters {where}"] = str(len(group["params"]))
                    else:
                        found[f"{key} {where}"] = repr(_plain(group[key]))
        return found


def _is_fixed(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_fixed, value))
    return value is None or type(value) in (bool, int, float, str)


def first_difference(entries: Sequence[Mapping[str, str]]) -> str:
    """In words, the first hyper-parameter that is not the same on all ranks."""
    names = dict.fromkeys(name for each in entries for name in each)
    for name in names:
        values = [each.get(name, "absent") for each in entries]
        if len(set(values)) > 1:
            return f"{name} is " + ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    return "they were equal when compared again; do not change them while a step is under way"


def _plain(value: Any) -> Any:
    """The value as something whose text is the same in every process."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, tuple | list):
        return tuple(_plain(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return type(value).__name__


def of_sampled(parameters: Iterable[torch.Tensor]) -> int:
    """Over a few elements of each parameter: cheap enough for now and then in training."""
    hasher = hashlib.blake2b(digest_size=8)
    for parameter in parameters:
        flat = parameter.detach().reshape(-1)
        hasher.update(raw_bytes(flat[:: max(1, flat.numel() // _SAMPLED)].contiguous()))
    return (int.from_bytes(hasher.digest(), "little") >> 1) or 1


def odd_ones_out(digests: Sequence[int]) -> tuple[int, ...]:
    """The ranks that do not hold what most hold; all of them where there is no most."""
    counts = {digest: digests.count(digest) for digest in digests}
    most = max(counts.values())
    common = [digest for digest, count in counts.items() if count == most]
    return tuple(rank for rank, digest in enumerate(digests) if len(common) > 1 or digest != common[0])


def of_state(tensors: Iterable[torch.Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """64 bits over every bit of parameters, buffers and optimizer state."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        _update(hasher, tensor)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                for key in sorted(state, key=str):
                    hasher.update(str(key).encode())
                    _update(hasher, state[key])
    return int.from_bytes(hasher.digest()[:8], "little")


def _update(hasher: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
        hasher.update(raw_bytes(value.detach().contiguous()))
    else:
        hasher.update(repr(_plain(value)).encode())
