"""Members that live but cannot reach each other: the coordinator asks whom each can reach, and lets some go.

When members complain of others that live, all who hold the training state are asked to dial each other (`Survey`, in
their directives). Their answers say which hosts are parted, and `partition` which of them go on together. It is decided
when all have answered, or at the silence deadline with the answers that are there.

Once somebody was let go for this reason, which the records of members remember, whoever comes gets a seat only after it
has reached every member of the plan in force, and each of them has reached it. Else it would come in, break the group
and be let go again, as long as hosts stay parted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paceline.control.machines.partition import HostWeight, hosts_to_keep
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.members import Survey

UNREACHABLE = "not all members that live can reach it"
AGAIN_S = 2.0  # before a newcomer that could not reach all may try again
_TERM_SHIFT = 32


class Surveys:
    """`host` is the coordinator's own, "" if it is not known."""

    def __init__(self, silence_s: float, host: str) -> None:
        self._silence_s = silence_s
        self._host = host
        self._count = 0
        self._fence = 0  # the recovery that members were asked for
        self._number = 0
        self._asked_at: dict[str, float] = {}
        self._about: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())  # newcomers, and members
        self._examination = 0  # the number of the survey about them
        self._examined_at = 0.0

    # -- recovery ----------------------------------------------------------------------------------------------------

    def parted(
        self, holders: Sequence[MemberRecord], generation: int, fence: int, term: int, now: float
    ) -> list[MemberRecord] | None:
        """Who of these has to go because others cannot reach it; None while answers are waited for. They broke in this
        generation or a later one, have promised to apply nothing below the fence, and all live."""
        if self._fence != fence:
            if not _has_complaint(holders, generation):
                return []
            self._fence, self._number = fence, self._next_number(term)
            for record in holders:
                self._ask(record, holders, self._number, now)
        if any(self._is_awaited(record, now) for record in holders):
            return None
        keep = hosts_to_keep(_weights(holders, self._host), _cut_between(holders, self._number))
        return [record for record in holders if record.host not in keep]

    def _is_awaited(self, record: MemberRecord, now: float) -> bool:
        if record.survey is None or record.working.surveyed >= self._number:
            return False
        return now - self._asked_at[record.member] <= self._silence_s

    # -- newcomers ---------------------------------------------------------------------------------------------------

    def admitted(
        self,
        newcomers: Sequence[MemberRecord],
        members: Sequence[MemberRecord],
        records: Iterable[MemberRecord],
        term: int,
        now: float,
    ) -> list[MemberRecord]:
        """Who of the newcomers may have a seat beside these members; whether others could have one is asked for."""
        if not newcomers or not any(_was_unreachable(record) for record in records):
            return list(newcomers)
        self._examine(newcomers, members, term, now)
        return [record for record in newcomers if self._is_joined_to_all(record, members)]

    def _examine(self, asked: Sequence[MemberRecord], members: Sequence[MemberRecord], term: int, now: float) -> None:
        """Let these newcomers and the members dial each other; again when it is about others, or after a while."""
        about = frozenset(record.member for record in asked), frozenset(record.member for record in members)
        if about == self._about and now - self._examined_at <= AGAIN_S:
            return
        self._about, self._examined_at, self._examination = about, now, self._next_number(term)
        for record in asked:
            self._ask(record, members, self._examination, now)
        for record in members:
            self._ask(record, asked, self._examination, now)

    def _is_joined_to_all(self, newcomer: MemberRecord, members: Sequence[MemberRecord]) -> bool:
        return all(
            self._has_reached(newcomer, member) and self._has_reached(member, newcomer)
            for member in members
            if member.host != newcomer.host
        )

    def _has_reached(self, one: MemberRecord, other: MemberRecord) -> bool:
        working = one.working
        return working.surveyed == self._examination and other.member not in working.unreachable

    # -- asking ------------------------------------------------------------------------------------------------------

    def _ask(self, record: MemberRecord, members: Sequence[MemberRecord], number: int, now: float) -> None:
        record.survey = Survey(number, _targets_for(record, members))
        self._asked_at[record.member] = now

    def _next_number(self, term: int) -> int:
        """Higher than that of any survey before, also of an earlier coordinator's."""
        self._count += 1
        return (term << _TERM_SHIFT) + self._count


def _has_complaint(holders: Sequence[MemberRecord], generation: int) -> bool:
    """Whether one of them found another, on another host, to be lost. Of a host's own processes the kernel tells."""
    host_of = {record.member: record.host for record in holders}
    return any(
        suspect in host_of and host_of[suspect] != record.host
        for record in holders
        if record.working.broken >= generation
        for suspect in record.working.suspects
    )


def _targets_for(record: MemberRecord, members: Sequence[MemberRecord]) -> dict[str, tuple[str, int]]:
    others = (other for other in members if other.host != record.host)
    return {other.member: other.introduction.card.address for other in others}


def _weights(holders: Sequence[MemberRecord], coordinator: str) -> list[HostWeight]:
    hosts: dict[str, list[MemberRecord]] = {}
    for record in holders:
        hosts.setdefault(record.host, []).append(record)
    return [
        HostWeight(host, len(there), max(record.working.applied for record in there), host == coordinator)
        for host, there in hosts.items()
    ]


def _cut_between(holders: Sequence[MemberRecord], number: int) -> set[tuple[str, str]]:
    """The pairs of hosts of which none of the first's members reached any of the second's. Where some were reached, the
    path is good, and who was not may have died meanwhile: that must not cost the others on its host."""
    tried: set[tuple[str, str]] = set()
    reached: set[tuple[str, str]] = set()
    for record in holders:
        if record.working.surveyed >= number:
            for other in holders:
                if other.host != record.host and record.survey and other.member in record.survey.targets:
                    (tried if other.member in record.working.unreachable else reached).add((record.host, other.host))
    return tried - reached


def _was_unreachable(record: MemberRecord) -> bool:
    return record.fate is Fate.EVICTED and record.reason.startswith(UNREACHABLE)
