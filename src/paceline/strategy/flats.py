"""Dense parameters that are on servers, as a worker has them: gradients and values, flat, section by section, in memory
that servers on the same host read and write.

Values are there twice: those that the model has, and those that the next pull writes. `swap` makes the model have the
latter; until then nothing of it has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.server.client import GroupClient
from paceline.server.layout import ParameterPart, RangeLayout
from paceline.server.parcels import Packing, Slice
from paceline.strategy.numerics import Examined
from paceline.strategy.views import GradientViews


class Flats(GradientViews):
    """Also the store of a collector: gradients go where they are pushed from."""

    def __init__(self, layout: RangeLayout, client: GroupClient) -> None:
        self._layout = layout
        self._gradients = [client.empty((section.size,), section.dtype).zero_() for section in layout.sections]
        self._values = [client.empty((section.size,), section.dtype) for section in layout.sections]
        self._next = [client.empty((section.size,), section.dtype) for section in layout.sections]
        self._has_taken_over = False
        self._views = {}
        self._parts: list[tuple[int, ParameterPart]] = []

    def take_over(self, trained: Mapping[str, torch.Tensor]) -> None:
        """Let the parameters of the model lie here. `trained` are those that get gradients now."""
        where = {
            part.name: (number, part) for number, section in enumerate(self._layout.sections) for part in section.parts
        }
        unknown = [name for name in trained if name not in where]
        if unknown:
            raise ValueError(
                f"{unknown[0]} became trainable after the session was made, when parameters are divided among servers; "
                "set requires_grad, and give parameters to optimizers, before"
            )
        if not self._has_taken_over:
            for number, part in where.values():
                values = self._values[number][part.start : part.stop]
                values.copy_(part.parameter.detach().reshape(-1))
                part.parameter.data = values.view(part.parameter.shape)
            self._has_taken_over = True
        self._parts = [where[name] for name in trained]
        self._views = {
            index: self._gradients[number][part.start : part.stop].view(part.parameter.shape)
            for index, (number, part) in enumerate(self._parts)
        }
        for gradients in self._gradients:
            gradients.zero_()

    # -- as a store --------------------------------------------------------------------------------------------------

    def reduce(self, examined: Examined) -> None:
        """The servers add up; here is only to be seen whether there is anything that must not be."""
        for gradients in self._gradients:
            examined.look(gradients)

    def scale(self, factor: float) -> None:
        raise AssertionError("the servers multiply")

    # -- on their way ------------------------------------------------------------------------------------------------

    def gradients(self, ranges: Sequence[int], packing: Packing) -> tuple[Slice, ...]:
        return self._slices(self._gradients, ranges, packing)

    def next_values(self, ranges: Sequence[int], packing: Packing) -> tuple[Slice, ...]:
        return self._slices(self._next, ranges, packing)

    def values(self, ranges: Sequence[int], packing: Packing) -> tuple[Slice, ...]:
        return self._slices(self._values, ranges, packing)

    def _slices(self, flats: Sequence[torch.Tensor], ranges: Sequence[int], packing: Packing) -> tuple[Slice, ...]:
        spans = self._layout.spans
        return tuple(
            packing.slice(number, flats[spans[number].section][spans[number].start : spans[number].stop])
            for number in ranges
            if number < len(spans)
        )

    def unused(self, used: Sequence[bool]) -> tuple[Slice, ...]:
        """Where the parameters are that got no gradient from any worker, and those that are not trained now."""
        trained = {part.name for (_, part), is_used in zip(self._parts, used, strict=True) if is_used}
        return tuple(
            Slice(number, 0, start, length)
            for section in self._layout.sections
            for part in section.parts
            if part.name not in trained
            for number, start, length in self._layout.spans_of(part.name)
        )

    def swap(self) -> None:
        self._values, self._next = self._next, self._values
        for number, section in enumerate(self._layout.sections):
            values = self._values[number]
            for part in section.parts:
                part.parameter.data = values[part.start : part.stop].view(part.parameter.shape)
