"""What of a worker's events is worth a line in the run's log, and how it is said there."""

from __future__ import annotations

from collections.abc import Callable

from paceline.control.messages import losses

RUN_LOG: dict[str, Callable[[str], tuple[str, str]]] = {
    "published": lambda text: ("checkpoint", text),
    "failed": lambda text: ("warning", f"no checkpoint: {text}"),
    "waits": lambda text: ("warning", f"no checkpoint yet: {text}"),
    "skipped": lambda text: ("warning", f"no checkpoint: {text}"),
    "skipped checkpoint": lambda text: ("warning", f"unreadable, put aside: {text}"),
    "loader": lambda text: ("warning", f"{text}; loader workers are started again"),
    "out of memory": lambda text: ("warning", f"out of memory {text}"),
    "shares": lambda text: ("shares", text),
    "burden": lambda text: ("warning", text),
    "skipped step": lambda text: ("warning", f"step skipped: {text}"),
    "resumed": lambda text: ("resumed", text),
    losses.NOT_SAVED: lambda text: (losses.NOT_SAVED, text),
    "lost updates": lambda text: ("lost updates", text),
}
