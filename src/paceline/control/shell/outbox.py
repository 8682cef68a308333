"""What waits to be sent on one connection of the control plane: the newest of each kind, in the order of its making.

Messages are state, not news, so an older one of the same kind is of no interest any more. What is newer is sent later:
a directive without its plan must not overtake the one that has it.
"""

from __future__ import annotations

from typing import Any


class Outbox:
    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}

    def put(self, kind: str, body: Any) -> None:
        """In place of an older one of its kind, but after whatever else waits."""
        self._waiting.pop(kind, None)
        self._waiting[kind] = body

    def take(self) -> tuple[str, Any]:
        """The next one to send."""
        kind = next(iter(self._waiting))
        return kind, self._waiting.pop(kind)

    def __bool__(self) -> bool:
        return bool(self._waiting)
