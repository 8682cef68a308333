"""Processes that were started for a run and have not joined it yet: they import, build the model, or wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.labels import read_started
from paceline.control.machines.agents import Starting
from paceline.watch import words
from paceline.watch.names import is_here

MAX_NAMED = 5


class Newcomer(msgspec.Struct, frozen=True):
    """`label` and `host` are empty where they are not known: of an agent none of whose processes has joined yet."""

    role: str
    pid: int
    label: str = ""
    host: str = ""

    def __str__(self) -> str:
        """worker w1 (process 4711 on lab-1)"""
        name = f"{self.role} {self.label}" if self.label else self.role
        return f"{name} (process {self.pid}{f' on {words.one_line(self.host, 40)}' if self.host else ''})"


def newcomers_of(starting: Iterable[Starting], members: Sequence[MemberRow], folder: Path) -> tuple[Newcomer, ...]:
    hosts = {row.agent: row.host for row in members}
    elsewhere = {row.agent for row in members if not is_here(row)}
    starting = list(starting)
    label_of = read_started(folder).label_of if starting else {}
    return tuple(
        Newcomer(
            role="server" if one.is_server else "worker",
            pid=one.pid,
            label="" if one.agent in elsewhere else label_of.get(one.pid, ""),
            host=hosts.get(one.agent, ""),
        )
        for one in starting
    )


def in_one_line(newcomers: Sequence[Newcomer]) -> str:
    """being started: worker w1 (process 4711 on lab-1)"""
    more = f" and {len(newcomers) - MAX_NAMED:,} more" if len(newcomers) > MAX_NAMED else ""
    return f"being started: {', '.join(map(str, newcomers[:MAX_NAMED]))}{more}"
