"""How up to date the parameters are that a worker computes with.

sync        all workers step together: the result is that of one process
bounded:K   each for itself, but a lease starts only when all but the K before it are done and seen
async       each for itself, with whatever the servers have
"""

from __future__ import annotations

from typing import NamedTuple


class Consistency(NamedTuple):
    is_leased: bool = False
    bound: int = -1  # none


def parse(text: str, strategy: str) -> Consistency:
    if text == "sync":
        return Consistency()
    kind, _, number = text.partition(":")
    if kind == "bounded" and number.isdecimal():
        found = Consistency(True, int(number))
    elif text == "async":
        found = Consistency(True)
    else:
        raise ValueError(f"consistency={text!r}: use 'sync', 'async', or 'bounded:K' with a number of leases K")
    if strategy != "server":
        raise ValueError(
            f"consistency={text!r} lets workers update without waiting for each other, and strategy={strategy!r} does "
            "not; use strategy='server', where servers make the updates, or consistency='sync'"
        )
    return found
