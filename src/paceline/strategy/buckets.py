"""Where the gradients of a worker lie: in flat buckets that a group reduces in place, or, alone, as autograd made
them.

A bucket holds parameters of one type, in reverse order of registration, which is about the order in which backward
comes to them; the order is the same on all ranks whatever order gradients arrive in. Buckets are allocated from the
group and live as long as its binding: a member that was stopped in an operation of an older group may wake and write
into that one's buckets, which nobody reads any more.

Each rank examines the slice of each bucket that it combined itself, right after its reduction: it is still in its
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.collective import Group
from paceline.collective.base import bounds
from paceline.strategy.numerics import Examined
from paceline.strategy.views import GradientViews
from paceline.watch import spans

# Enough that meeting costs little beside adding up; little enough that a slice is examined while it is in the cache,
# and that the first bucket is sent early between hosts. A larger parameter has a bucket of its own.
BUCKET_BYTES = 8 << 20
# Gradients begin at multiples of a cache line.
_LINE_BYTES = 64


class BucketPlace(NamedTuple):
    number: int
    start: int
    size: int


class BucketLayout(NamedTuple):
    """One bucket: its type, its length and where each parameter lies."""

    dtype: torch.dtype
    size: int
    places: tuple[BucketPlace, ...]


def lay_out(parameters: Sequence[torch.Tensor], bucket_bytes: int) -> list[BucketLayout]:
    """Cut the parameters into buckets of about this size; pure, and the same on all ranks."""
    buckets: list[BucketLayout] = []
    pending: dict[torch.dtype, tuple[list[BucketPlace], int]] = {}

    def close(dtype: torch.dtype) -> None:
        places, size = pending.pop(dtype)
        buckets.append(BucketLayout(dtype, size, tuple(places)))

    for number in reversed(range(len(parameters))):
        parameter = parameters[number]
        places, size = pending.setdefault(parameter.dtype, ([], 0))
        line = max(1, _LINE_BYTES // parameter.dtype.itemsize)
        places.append(BucketPlace(number, size, parameter.numel()))
        size += -(-parameter.numel() // line) * line
        pending[parameter.dtype] = (places, size)
        if size * parameter.dtype.itemsize >= bucket_bytes:
            close(parameter.dtype)
    for dtype in list(pending):
        close(dtype)
    return buckets


class Buckets(GradientViews):
    """The gradients of a member of a group."""

    def __init__(self, group: Group, parameters: Mapping[str, torch.Tensor]) -> None:
        self.group = group
        tensors = tuple(parameters.values())
        self.layouts = lay_out(tensors, BUCKET_BYTES)
        # What lies between gradients must be finite.
        self.flats = [group.empty((layout.size,), layout.dtype).zero_() for layout in self.layouts]
        self.slices = [flat[slice(*bounds(flat.numel(), group.size)[group.rank])] for flat in self.flats]
        views: dict[int, torch.Tensor] = {}
        for layout, flat in zip(self.layouts, self.flats, strict=True):
            for place in layout.places:
                part = flat[place.start : place.start + place.size]
                views[place.number] = _shaped(part, tensors[place.number])
        self._views = views

    def reduce(self, examined: Examined) -> None:
        before = spans.mark("reduce")
        for flat, part in zip(self.flats, self.slices, strict=True):
            self.group.all_reduce(flat)
            examined.look(part)
        spans.mark(before)

    def scale(self, factor: float) -> None:
        for flat in self.flats:
            flat.mul_(factor)


class Loose:
    """The gradients of a worker that is alone: no memory of their own."""

    def __init__(self) -> None:
        self._gradients: dict[int, torch.Tensor] = {}

    def begin(self, num_pieces: int, *, is_dry_run: bool) -> None:
        self._gradients.clear()

    def give_up(self) -> None:
        self._gradients.clear()

    def put(self, number: int, gradient: torch.Tensor) -> None:
        self._gradients[number] = gradient

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._gradients[number].add_(gradient)

    def clear(self, number: int) -> None:
        pass

    def get(self, number: int) -> torch.Tensor:
        return self._gradients[number]

    def reduce(self, examined: Examined) -> None:
        examined.look_at_all(list(self._in_order()))

    def has_late(self) -> bool:
        return False

    def reduce_late(self, examined: Examined) -> None:
        raise AssertionError("nothing is late where nothing is sent")

    def scale(self, factor: float) -> None:
        for gradient in self._in_order():
            gradient.mul_(factor)

    def _in_order(self) -> Iterator[torch.Tensor]:
        return (self._gradients[number] for number in sorted(self._gradients))


def _shaped(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part as a gradient of this parameter, with its strides where these leave no gaps (channels last, say)."""
    strides = torch.empty_like(parameter, device="meta").stride()
    return part.as_strided(parameter.shape, strides)
