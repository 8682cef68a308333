"""Gradients that are written to where they will be sent from: a view of that memory for each parameter, by number.
What is common to the stores of a collector that have such memory and send nothing before the end of backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from paceline.strategy.numerics import Examined


class GradientViews:
    """`_views` is set by who has the memory."""

    _views: Mapping[int, torch.Tensor]

    def begin(self, num_pieces: int, *, is_dry_run: bool) -> None:
        pass

    def give_up(self) -> None:
        pass

    def put(self, number: int, gradient: torch.Tensor) -> None:
        self._views[number].copy_(gradient)

    def add(self, number: int, gradient: torch.Tensor) -> None:
        self._views[number].add_(gradient)

    def clear(self, number: int) -> None:
        self._views[number].zero_()

    def get(self, number: int) -> torch.Tensor:
        return self._views[number]

    def has_late(self) -> bool:
        return False

    def reduce_late(self, examined: Examined) -> None:
        raise AssertionError("nothing is late where everything waits for the end of backward")
