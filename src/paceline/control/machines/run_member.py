"""What the machines of workers and of servers have in common: they introduce themselves, go by the coordinator's newest
word, and end by its verdict."""

from __future__ import annotations

from typing import Any

from paceline.control.machines.member_events import AdoptPlacement, Exit, Fail, MemberReady, SendReport
from paceline.control.messages.members import Directive, Introduction, Report, Serving, Verdict, Working
from paceline.control.messages.plan import Phase
from paceline.control.ordering import Newest
from paceline.placement.placement import Placement


class RunMember:
    def __init__(self, name: str) -> None:
        self.name = name
        self.phase = Phase.BUILDING
        self.leaving = False
        self._introduction: Introduction | None = None
        self._introduced = False
        self._placement = Placement()  # the newest one heard of
        self._cause = ""
        self._number = 0
        self._newest = Newest()
        self._verdict: Verdict | None = None
        self._actions: list[Any] = []

    def report(self) -> Report:
        self._number += 1
        return Report(
            member=self.name,
            number=self._number,
            term=self._newest.term,
            phase=self.phase,
            leaving=self.leaving,
            cause=self._cause,
            placement=self._placement.version,
            introduction=None if self._introduced else self._introduction,
            held=None if self._introduced or not self._placement.version else self._placement,
            working=self._working(),
            serving=self._serving(),
        )

    def _working(self) -> Working:
        return Working()

    def _serving(self) -> Serving | None:
        return None

    def _do(self, action: Any) -> None:
        self._actions.append(action)

    def _say(self) -> None:
        self._do(SendReport(self.report()))

    def _on_ready(self, event: MemberReady) -> None:
        self._introduction = event.introduction
        self.phase = Phase.READY
        self._say()

    def _on_leave(self) -> None:
        if not self.leaving:
            self.leaving = True
            self._say()

    def _on_fail(self, event: Fail) -> None:
        self.phase = Phase.FAILED
        self._cause = event.cause
        self._say()

    def _follow(self, directive: Directive) -> bool:
        """Do what concerns workers and servers alike; whether there may be more to do about it."""
        if not self._newest.passes(directive):
            return False
        if directive.verdict not in (Verdict.KNOWN, Verdict.UNKNOWN):
            self._end(directive.verdict, directive.reason)
            return False
        self._introduced = directive.verdict is Verdict.KNOWN
        self.leaving = self.leaving or directive.leave
        placement = directive.placement
        if placement is not None and placement.version > self._placement.version:
            self._placement = placement
            self._do(AdoptPlacement(placement))  # before a plan that may need it
        return True

    @property
    def _is_to_introduce_itself(self) -> bool:
        return not self._introduced and self._introduction is not None

    def _end(self, verdict: Verdict, reason: str) -> None:
        self._verdict = verdict
        self._do(Exit(verdict, reason))
