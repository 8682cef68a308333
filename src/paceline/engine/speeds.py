"""What a person says of the speed of machines: `--shares` and `--ranges` of a run, `--capacity` of one agent."""

from __future__ import annotations

import math

import msgspec

# How many seconds a worker may try the model before it joins; for `warm_up`.
PROBE_VARIABLE = "PACELINE_PROBE_S"
AUTO, EQUAL, FIXED, PROBE = "auto", "equal", "fixed", "probe"

_PROBE_S = 1.0
_LEAST, _MOST = 0.001, 1000.0


class Capacity(msgspec.Struct, frozen=True):
    """How fast the workers of an agent are beside others: declared (0 if not), or found by trying the model."""

    declared: float = 0.0
    is_tried: bool = False

    @property
    def environment(self) -> dict[str, str]:
        return {PROBE_VARIABLE: str(_PROBE_S)} if self.is_tried else {}


def parse_shares(text: str) -> tuple[int, ...]:
    """For `Settings.shares`: auto, equal, or fixed ones such as 4:2:1."""
    if text == AUTO:
        return ()
    if text == EQUAL:
        return (1,)
    try:
        shares = tuple(int(part) for part in text.split(":"))
    except ValueError:
        shares = ()
    if len(shares) < 2 or any(share < 1 for share in shares):
        raise ValueError(
            f"--shares {text}: give {AUTO} (each worker takes what it can), {EQUAL}, or a whole number above 0 for "
            "each worker, such as 4:2:1"
        )
    return shares


def parse_ranges(text: str) -> bool:
    """For `Settings.by_load`."""
    if text not in (AUTO, FIXED):
        raise ValueError(
            f"--ranges {text}: give {AUTO} (a server that has much more to do than others gives ranges away), or "
            f"{FIXED} (each has as many as its capacity says)"
        )
    return text == AUTO


def parse_capacity(text: str) -> Capacity:
    """ "" for nothing known, a number, or probe."""
    if not text:
        return Capacity()
    if text == PROBE:
        return Capacity(is_tried=True)
    try:
        declared = float(text)
    except ValueError:
        declared = math.nan
    if not _LEAST <= declared <= _MOST:
        raise ValueError(
            f"--capacity {text}: give how fast this machine is beside the others, from {_LEAST} to {_MOST:.0f} "
            f"(2 is twice as fast as most), or {PROBE} to let its workers try"
        )
    return Capacity(declared)
