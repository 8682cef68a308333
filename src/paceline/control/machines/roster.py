"""What the coordinator knows of one member."""

from __future__ import annotations

from enum import Enum

import msgspec

from paceline.control.messages.members import Introduction, Report, Serving, Survey, Working
from paceline.control.messages.plan import Phase
from paceline.wire.decoding import decode


class Fate(Enum):
    """How a member's part in the run ended."""

    DEAD = "dead"
    FAILED = "failed"
    EVICTED = "evicted"
    REFUSED = "refused"
    RELEASED = "released"


class _Durable(msgspec.Struct, frozen=True):
    introduction: Introduction
    fate: Fate | None
    reason: str
    draining: bool


class MemberRecord:
    def __init__(self, introduction: Introduction, now: float) -> None:
        self.introduction = introduction
        self.report = Report(introduction.card.member, 0, 0, Phase.BUILDING)
        self.heard = now
        self.connected = True
        self.fate: Fate | None = None
        self.reason = ""
        self.draining = False
        self.survey: Survey | None = None  # whom it was asked to reach
        self.told: object = None

    @property
    def member(self) -> str:
        return self.introduction.card.member

    @property
    def host(self) -> str:
        """Equal for members that share a machine."""
        return self.introduction.card.host

    @property
    def is_server(self) -> bool:
        return self.introduction.card.role == "server"

    @property
    def number(self) -> int:
        return self.report.number

    @property
    def working(self) -> Working:
        """What it said last of its work."""
        return self.report.working

    @property
    def is_going(self) -> bool:
        """Wants to leave, or was asked to."""
        return self.report.leaving or self.draining

    def describe(self) -> str:
        who = self.introduction
        return f"{who.card.role} {self.member} (process {who.pid} on {who.host})"

    def take(self, report: Report) -> bool:
        """A newer report; whether a decision could depend on what is new in it. Progress alone is no such thing."""
        before = self._essence()
        self.report = msgspec.structs.replace(report, introduction=None)
        return self._essence() != before

    def _essence(self) -> Report:
        serving = self.report.serving
        if serving is not None:  # figures are for people, and for the next tick
            serving = Serving(serving.version, serving.synced, serving.handed)
        working = msgspec.structs.replace(self.working, applied=min(self.working.applied, 0))
        return msgspec.structs.replace(self.report, number=0, term=0, placement=0, working=working, serving=serving)

    # -- memory ------------------------------------------------------------------------------------------------------

    def durable(self) -> bytes:
        return msgspec.msgpack.encode(_Durable(self.introduction, self.fate, self.reason, self.draining))

    @classmethod
    def restore(cls, value: bytes, now: float) -> MemberRecord:
        durable = decode(value, _Durable)
        record = cls(durable.introduction, now)
        record.connected = False
        record.fate = durable.fate
        record.reason = durable.reason
        record.draining = durable.draining
        return record
