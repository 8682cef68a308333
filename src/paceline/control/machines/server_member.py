"""A server's side of membership: small, because a server takes part in no plan. It follows the placement, says how far
it is, and goes when it is let go.

The events and actions are those of `member_events` as far as they concern a server, and one of its own; so the client
that runs a worker's machine runs this one too.
"""

from __future__ import annotations

from typing import NamedTuple, assert_never

from paceline.control.machines.member_events import AdoptPlacement, Exit, Fail, Leave, MemberReady, SendReport
from paceline.control.messages.members import Directive, Introduction, Report, Serving, Verdict
from paceline.control.messages.plan import Phase
from paceline.control.ordering import Newest
from paceline.placement.placement import Placement


class ServingChanged(NamedTuple):
    """The server says how far it is."""

    serving: Serving


Event = MemberReady | Leave | Fail | ServingChanged | Directive
Action = SendReport | AdoptPlacement | Exit


class ServerMember:
    plan = None  # of no interest to a server

    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.BUILDING
        self._leaving = False
        self._cause = ""
        self._placement = Placement()
        self._serving = Serving()
        self._introduction: Introduction | None = None
        self._introduced = False
        self._number = 0
        self._newest = Newest()
        self._has_verdict = False
        self._actions: list[Action] = []

    def report(self) -> Report:
        self._number += 1
        return Report(
            member=self.name,
            number=self._number,
            term=self._newest.term,
            phase=self.phase,
            leaving=self._leaving,
            cause=self._cause,
            placement=self._placement.version,
            serving=self._serving,
            introduction=None if self._introduced else self._introduction,
            held=None if self._introduced or not self._placement.version else self._placement,
        )

    def handle(self, event: Event) -> list[Action]:
        self._actions = []
        if not self._has_verdict:
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
                    self._on_directive(event)
                case _:
                    assert_never(event)
        return self._actions

    def _say(self) -> None:
        self._actions.append(SendReport(self.report()))

    def _on_ready(self, event: MemberReady) -> None:
        self._introduction = event.introduction
        self.phase = Phase.READY
        self._say()

    def _on_leave(self) -> None:
        if not self._leaving:
            self._leaving = True
            self._say()

    def _on_fail(self, event: Fail) -> None:
        self.phase = Phase.FAILED
        self._cause = event.cause
        self._say()

    def _on_served(self, event: ServingChanged) -> None:
        """What the coordinator decides by is said at once, figures for people with the next heartbeat."""
        decides = ("version", "synced", "handed")
        is_news = any(getattr(event.serving, name) != getattr(self._serving, name) for name in decides)
        self._serving = event.serving
        if is_news:
            self._say()

    def _on_directive(self, directive: Directive) -> None:
        if not self._newest.passes(directive):
            return
        if directive.verdict not in (Verdict.KNOWN, Verdict.UNKNOWN):
            self._has_verdict = True
            self._actions.append(Exit(directive.verdict, directive.reason))
            return
        self._introduced = directive.verdict is Verdict.KNOWN
        if directive.leave:
            self._leaving = True
        placement = directive.placement
        if placement is not None and placement.version > self._placement.version:
            self._placement = placement
            self._actions.append(AdoptPlacement(placement))
        if not self._introduced and self._introduction is not None:
            self._say()
