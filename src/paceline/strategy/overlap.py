"""Between hosts: buckets are sent while backward still computes the next ones.

A bucket is sent when as many gradients have come as came in an earlier attempt with as many micro-batches; the first
such attempt only counts. Buckets go in their one order, each after the one before it.

The counts may be wrong: a branch of the model, or re-entrant checkpointing, may bring another gradient for a bucket
that is under way. That never makes a wrong sum, because a bucket that was sent is not touched any more: what comes
later is kept aside, the header says so, and all ranks add it in one more round. A bucket that waits for a gradient that
never comes is sent at the end of backward.

After an attempt that ended in the middle, with buckets under way, the ranks are out of step and the group is aborted.
"""

from __future__ import annotations

import torch

from paceline.collective import Handle
from paceline.errors import GroupAborted
from paceline.strategy.buckets import Buckets
from paceline.strategy.numerics import Examined
from paceline.watch import spans

_OVER = "an attempt at a step ended after a part of its gradients was sent"


class Overlapped:
    """`buckets`, sent early."""

    def __init__(self, buckets: Buckets) -> None:
        self._buckets = buckets
        self._bucket_of = {
            place.number: index for index, layout in enumerate(buckets.layouts) for place in layout.places
        }
        self._learned: dict[int, list[int]] = {}
        self._handles: list[Handle] = []
        self._is_over = False
        self._reset(0, None)

    def _reset(self, num_pieces: int, expected: list[int] | None) -> None:
        num_buckets = len(self._buckets.layouts)
        self._num_pieces = num_pieces
        self._expected = expected
        self._arrived = [0] * num_buckets
        self._present: set[int] = set()
        self._late: dict[int, torch.Tensor] = {}

    def begin(self, num_pieces: int, *, is_dry_run: bool) -> None:
        self.give_up()  # what was sent for an attempt that nobody will finish
        if self._is_over:
            raise GroupAborted(_OVER)  # at once, not after another attempt at what cannot be reduced here
        self._reset(num_pieces, None if is_dry_run else self._learned.get(num_pieces))

    def give_up(self) -> None:
        if self._handles:
            self._handles = []
            self._is_over = True
            self._buckets.group.abort(_OVER)

    def put(self, number: int, gradient: torch.Tensor) -> None:
        self._take(number, gradient)

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._take(number, gradient)

    def _take(self, number: int, gradient: torch.Tensor) -> None:
        index = self._bucket_of[number]
        self._arrived[index] += 1
        if index < len(self._handles):
            before = self._late.get(number)
            self._late[number] = gradient if before is None else before.add_(gradient)
            return
        if number in self._present:
            self._buckets.add(number, gradient)
        else:
            self._present.add(number)
            self._buckets.put(number, gradient)
        self._send_what_is_full()

    def _send_what_is_full(self) -> None:
        expected = self._expected
        if expected is None:
            return
        while (index := len(self._handles)) < len(expected) and self._arrived[index] >= expected[index] > 0:
            self._send(index)

    def _send(self, index: int) -> None:
        for place in self._buckets.layouts[index].places:
            if place.number not in self._present:
                self._buckets.clear(place.number)
        self._handles.append(self._buckets.group.all_reduce(self._buckets.flats[index], async_op=True))

    def clear(self, number: int) -> None:
        if self._bucket_of[number] >= len(self._handles):
            self._buckets.clear(number)

    def get(self, number: int) -> torch.Tensor:
        return self._buckets.get(number)

    def reduce(self, examined: Examined) -> None:
        before = spans.mark("reduce")
        for index in range(len(self._handles), len(self._buckets.flats)):
            self._send(index)
        handles, self._handles = self._handles, []
        for handle, part in zip(handles, self._buckets.slices, strict=True):
            handle.wait()
            examined.look(part)
        spans.mark(before)
        if self._late:
            self._learned.pop(self._num_pieces, None)  # count anew
        elif self._num_pieces:
            self._learned[self._num_pieces] = self._arrived

    def has_late(self) -> bool:
        return bool(self._late)

    def reduce_late(self, examined: Examined) -> None:
        for layout, flat, part in zip(self._buckets.layouts, self._buckets.flats, self._buckets.slices, strict=True):
            missing = torch.zeros_like(flat)
            for place in layout.places:
                if (gradient := self._late.get(place.number)) is not None:
                    missing[place.start : place.start + place.size].as_strided(
                        gradient.shape, self._buckets.get(place.number).stride()
                    ).copy_(gradient)
            self._buckets.group.all_reduce(missing)
            flat.add_(missing)
            examined.look(part)
        self._late = {}

    def scale(self, factor: float) -> None:
        self._buckets.scale(factor)
