"""What counts as a dataset, and whether two workers hold the same one.

A dataset is map-style: `len(dataset)` samples, each `dataset[index]`. Anything else is refused by name before a run
begins.

`fingerprint` is cheap: it looks at the length, the type's name and eight samples, under fixed random numbers. It tells
different data apart, and data from augmentation that differs; it does not prove that two datasets are equal. Floating
point content counts bit by bit, so decoders or CPUs that differ in the last bit give different fingerprints.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from paceline.data.seeding import generators_kept, seed_for_sample

_NUM_LOOKED_AT = 8
_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)


def check_dataset(dataset: Any) -> int:
    """The number of samples of a dataset that can be trained on; TypeError or ValueError for any other."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is an iterable dataset; iterable datasets are not supported yet; "
            "give a map-style dataset with __len__ and __getitem__, so that each sample has an index"
        )
    for method in ("__len__", "__getitem__"):
        if not hasattr(dataset, method):
            raise TypeError(f"{name} has no {method}; give a map-style dataset with __len__ and __getitem__")
    length = len(dataset)
    if length == 0:
        raise ValueError(f"{name} is empty; give a dataset of 1 sample or more")
    return length


def fingerprint(dataset: Any, *, seed: int = 0) -> str:
    """A short text that differs where datasets differ in length, type or the samples looked at."""
    length = check_dataset(dataset)
    looked_at = sorted({k * (length - 1) // (_NUM_LOOKED_AT - 1) for k in range(_NUM_LOOKED_AT)})
    found = hashlib.blake2b(f"{type(dataset).__qualname__} {length}".encode(), digest_size=16)
    with generators_kept():
        for index in looked_at:
            seed_for_sample(seed, 0, index)
            found.update(digest(dataset[index]))
    return found.hexdigest()


def digest(value: Any) -> bytes:
    """Of a value, bit by bit; of fixed size, so that parts put together cannot be mistaken for one another."""
    found = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


def _parts(value: Any) -> Iterator[bytes]:
    """A type, then what is in it. An object of an unknown type counts by the name of its type only."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    yield type(value).__qualname__.encode()
    if isinstance(value, _PLAIN):
        yield repr(value).encode()
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        if value.layout is torch.strided and not value.is_quantized:
            whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            yield whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype.str} {value.shape}".encode()
        if value.dtype.hasobject:
            yield from map(digest, value.reshape(-1).tolist())
        else:
            yield value.tobytes()
    elif isinstance(value, Mapping):
        # The order in which a dictionary was filled says nothing about its content.
        yield from sorted(digest(key) + digest(item) for key, item in value.items())
    elif isinstance(value, set | frozenset):
        yield from sorted(map(digest, value))
    elif isinstance(value, Sequence):
        yield from map(digest, value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (digest(getattr(value, field.name)) for field in dataclasses.fields(value))
    elif hasattr(value, "__array_interface__"):
        yield from _parts(np.asarray(value))  # an image, for instance
