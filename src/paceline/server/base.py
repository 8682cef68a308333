"""What the keeper, which decides, asks of the store, which has the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.server.messages import ApplyLease, CommitStep, StageStep

Parcel = Any  # tensors and what describes them; the store's affair


class RangeStore(Protocol):
    """The tensors of the ranges. Called by the keeper only, for ranges that it knows to be there."""

    def load(self, ranges: Sequence[int], parcel: Parcel) -> None: ...

    def stage(self, ranges: Sequence[int], push: StageStep, parcel: Parcel) -> None:
        """Keep what one rank pushed for a step."""

    def unstage(self, number: int, generation: int, step: int) -> None:
        """Throw away what was staged for this step of a range."""

    def commit(self, ranges: Sequence[int], commit: CommitStep) -> None:
        """Apply what is staged for the step, and keep it no longer."""

    def apply(self, ranges: Sequence[int], push: ApplyLease, parcel: Parcel) -> None: ...

    def pull(self, ranges: Sequence[int], parcel: Parcel) -> Parcel:
        """What the request wants to know of these ranges."""

    def snapshot(self, number: int) -> Parcel:
        """The whole state of a range, staged pushes too, as it is now."""

    def restore(self, number: int, parcel: Parcel) -> None: ...

    def forget(self, number: int) -> None: ...
