"""Texts with a traceback in them."""

from __future__ import annotations

TRACEBACK = "Traceback (most recent call last):"


def without_frames(text: str) -> str:
    """What comes before the traceback, and its last line, the error."""
    before, mark, trace = text.partition(TRACEBACK)
    lines = trace.strip().splitlines()
    return f"{before}{lines[-1]}" if mark and lines else text
