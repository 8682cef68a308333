"""What members are called where people read of them: as `paceline run` prints them (w0, s0) where they were started on
this machine, others by the beginning of their id."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from pathlib import Path

import msgspec

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.labels import read_started
from paceline.watch import words


def is_here(row: MemberRow) -> bool:
    """Whether a member was started on this machine, by its name; where several have it, the address stands behind."""
    return row.host.partition(" (")[0] == platform.node()


class Names(msgspec.Struct, frozen=True):
    """By id: the role of each member, and what it is called if not by its id."""

    roles: dict[str, str] = {}
    labels: dict[str, str] = {}

    @classmethod
    def of(cls, folder: Path, members: Iterable[MemberRow]) -> Names:
        """Of the members of the run in this folder."""
        members = list(members)
        label_of = read_started(folder).label_of
        return cls(
            {row.member: row.role for row in members},
            {row.member: label_of[row.pid] for row in members if row.pid in label_of and is_here(row)},
        )

    def short(self, member: str) -> str:
        """w0, or 1f00ab12"""
        return self.labels.get(member) or words.short(member)

    def with_role(self, member: str) -> str:
        """server s0, worker w0, worker 1f00ab12"""
        role = self.roles.get(member, "")
        return f"{role} {self.short(member)}" if role else self.short(member)

    def in_text(self, text: str) -> str:
        """A text that names members by their ids."""
        return words.with_short_ids(text, self.labels)
