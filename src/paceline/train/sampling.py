"""Which samples make up an update: a checkpoint says by which rule that was, so that a run goes on by the same one.

In the middle of an epoch a checkpoint holds the first so many samples of an order, or the leases of some numbers, each
of so many samples. With another order, leases of another size, or more or fewer samples, the rest of the epoch would be
other samples: some would be lost, and some would count twice. Between two epochs everything may change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

SAMPLING = "sampling"  # of a checkpoint; older ones have none


class Sampling(NamedTuple):
    """`order` tells any two orders of samples apart; `length` is the number of samples of an epoch."""

    batch: int
    order: str
    length: int

    def to_tree(self) -> dict[str, object]:
        return {"batch": self.batch, "order": self.order, "length": self.length}


def misfit(
    kept: Mapping[str, object],
    now: Sampling,
    *,
    position: int,
    leases: Sequence[tuple[int, int, Sequence[int]]],
    is_leased: bool,
) -> str:
    """Why a run cannot go on from a checkpoint; empty if it can. `leases` are the records of its ranges."""
    begun = [record for record in leases if record[1] or record[2]]
    length = int(str(kept.get("length", now.length)))
    if not (0 < position < length or begun):
        return ""
    remedy = "resume with the settings that the run began with, or from a checkpoint at the end of an epoch"
    if length != now.length:
        return f"in the middle of an epoch of {length} samples, and now the data has {now.length}; {remedy}"
    if kept.get("order") != now.order:
        return (
            f"in the middle of an epoch whose samples were {kept.get('order')}, and now they are {now.order}; {remedy}"
        )
    if (begun or is_leased) and kept.get("batch") != now.batch:
        return f"in the middle of an epoch in batches of {kept.get('batch')}, and now there are {now.batch}; {remedy}"
    return ""
