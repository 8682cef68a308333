"""Which samples make up an update: a checkpoint says by which rule that was, so that a run goes on by the same one.

In the middle of an epoch a checkpoint holds the first so many samples of an order, or the leases of some numbers, each
of so many samples. With another order, or leases of another size, the rest of the epoch would be other samples: some
would be lost, and some would count twice. Between two epochs everything may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SAMPLING = "sampling"  # of a checkpoint; older ones have none


class Sampling(NamedTuple):
    """`order` tells any two orders of samples apart."""

    batch: int
    order: str

    def to_tree(self) -> dict[str, object]:
        return {"batch": self.batch, "order": self.order}


def misfit(
    kept: Mapping[str, object],
    now: Sampling,
    *,
    position: int,
    length: int,
    leases: Sequence[tuple[int, int, Sequence[int]]],
    is_leased: bool,
) -> str:
    """Why a run cannot go on from a checkpoint; empty if it can. `leases` are the records of its ranges."""
    begun = [record for record in leases if record[1] or record[2]]
    if not (0 < position < length or begun):
        return ""
    remedy = "resume with the settings that the run began with, or from a checkpoint at the end of an epoch"
    if kept.get("order") != now.order:
        return (
            f"in the middle of an epoch whose samples were {kept.get('order')}, and now they are {now.order}; {remedy}"
        )
    if (begun or is_leased) and kept.get("batch") != now.batch:
        return f"in the middle of an epoch in batches of {kept.get('batch')}, and now there are {now.batch}; {remedy}"
    return ""
