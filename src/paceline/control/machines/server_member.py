"""A server's side of membership: small, because a server takes part in no plan. It follows the placement, says how far
it is, and goes when it is let go.

The events and actions are those of `member_events` as far as they concern a server, and one of its own; so the client
that runs a worker's machine runs this one too.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from paceline.control.machines.member_events import AdoptPlacement, Exit, Fail, Leave, MemberReady, SendReport
from paceline.control.machines.run_member import RunMember
from paceline.control.messages.members import Directive, Serving


class ServingChanged(NamedTuple):
    """The server says how far it is."""

    serving: Serving


Event = MemberReady | Leave | Fail | ServingChanged | Directive
Action = SendReport | AdoptPlacement | Exit


class ServerMember(RunMember):
    plan = None  # of no interest to a server

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._served = Serving()

    def _serving(self) -> Serving:
        return self._served

    def handle(self, event: Event) -> list[Action]:
        self._actions = []
        if self._verdict is None:
            match event:
                case MemberReady():
                    self._on_ready(event)
                case Leave():
                    self._on_leave()
                case Fail():
                    self._on_fail(event)
                case ServingChanged():
                    self._on_served(event)
                case Directive():
                    if self._follow(event) and self._is_to_introduce_itself:
                        self._say()
                case _:
                    assert_never(event)
        return self._actions

    def _on_served(self, event: ServingChanged) -> None:
        """What the coordinator decides by is said at once, figures for people with the next heartbeat."""
        decides = ("version", "synced", "handed")
        is_news = any(getattr(event.serving, name) != getattr(self._served, name) for name in decides)
        self._served = event.serving
        if is_news:
            self._say()
