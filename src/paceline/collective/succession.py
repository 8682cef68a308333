"""How the survivors of a group agree on who is left, and form the next one.

The lowest rank that lives leads; the others come to it. When all that live are there, it says who they are, and a name
that it draws for this try. All form that group and say how it went. Where it is there on all, they are told to go on
with it; else the leader tries again.

    the others                      the leader
    come               -->          waits until all that live have come; says for whom
                       <-- Missing
                       <-- Plan     the ranks, the name, and a word of the leader's to all
    form the group                  forms it
    Outcome            -->
                       <-- Go

They come over connections of the *first* group, which `retire`s and stays as long as they go on. That is why they end
in one group: a leader may die when it has told some to go and others not; those who went find out when they use the new
group, and come again to where the rest has been waiting.

Failure: `DeadlineExceeded` names who did not come, on all who did. Who dies meanwhile makes the group smaller. Nothing
is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from paceline.collective.forming import Parts
from paceline.errors import AddressError, ConnectionLost, DeadlineExceeded, GroupError, HandshakeRefused
from paceline.fault_points import FaultPoint
from paceline.wire.card import Card
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Expectation
from paceline.wire.reaching import reach
from paceline.wire.waiting import PLAIN, READ, Wanted, is_ready

AGAIN_S = 0.02  # before another try with a leader that cannot be reached
LAST_WORD_S = 1.0
ORDERING: FaultPoint[[str], None] = FaultPoint("the leader says one thing to one of the others")


class Missing(msgspec.Struct, frozen=True, tag="missing"):
    """Whom the leader waits for."""

    text: str


class SuccessionPlan(msgspec.Struct, frozen=True, tag="plan"):
    ranks: tuple[int, ...]
    name: str
    word: bytes


class Go(msgspec.Struct, frozen=True, tag="go"):
    pass


class LeaderGaveUp(msgspec.Struct, frozen=True, tag="over"):
    """The leader gave up."""

    text: str


class SuccessionOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    formed: bool


class HasClose(Protocol):
    def close(self) -> None: ...


GroupT = TypeVar("GroupT", bound=HasClose)
Form = Callable[[Sequence[int], str], GroupT]
Describe = Callable[[Card], str]
_LOST = (AddressError, ConnectionLost, HandshakeRefused)


def succeed(
    parts: Parts, form: Form[GroupT], make_word: Callable[[], bytes], describe: Describe, deadline: Deadline
) -> tuple[GroupT, bytes]:
    """The next group of who is left, made by `form(ranks, name)` on all of them, and the word of its rank 0."""
    while True:
        leader = min(rank for rank in range(len(parts.cards)) if _lives(parts, rank))
        if leader == parts.rank:
            return _Leader(parts, form, make_word, describe, deadline).lead()
        missing = f"{describe(parts.cards[leader])} to come"
        try:
            return _follow(parts, leader, form, missing, deadline)
        except _LOST as error:  # most likely its end, which is about to be seen
            if deadline.expired():
                raise deadline.error(missing) from error
        time.sleep(AGAIN_S)


def _lives(parts: Parts, rank: int) -> bool:
    return rank == parts.rank or not parts.health.has_ended(rank)


def _room(parts: Parts) -> str:
    return f"next of {parts.name}"


def _follow(parts: Parts, leader: int, form: Form[GroupT], missing: str, deadline: Deadline) -> tuple[GroupT, bytes]:
    made, word = None, b""
    try:
        connection = reach(
            parts.endpoint.credentials,
            parts.cards[leader],
            f"{_room(parts)}/{parts.rank}",
            deadline=deadline,
            host=parts.cards[parts.rank].host,
        )
    except DeadlineExceeded as error:
        raise deadline.error(missing) from error
    with contextlib.closing(connection):
        try:
            while True:
                order = _read(connection, Missing | SuccessionPlan | Go | LeaderGaveUp, deadline, missing)
                if isinstance(order, Missing):
                    missing = order.text
                elif isinstance(order, SuccessionPlan):
                    if made is not None:
                        made.close()
                    made, word = _try(form, order), order.word
                    connection.send("outcome", SuccessionOutcome(made is not None), deadline=deadline)
                elif isinstance(order, LeaderGaveUp):
                    raise DeadlineExceeded(order.text)
                elif made is not None:
                    found, made = made, None
                    return found, word
        finally:
            if made is not None:
                made.close()


def _try(form: Form[GroupT], plan: SuccessionPlan) -> GroupT | None:
    try:
        return form(plan.ranks, plan.name)
    except GroupError:  # somebody died, or gave up; the leader will see who
        return None


def _read(connection: Connection, body_type: Any, deadline: Deadline, waited_for: str) -> Any:
    try:
        return connection.receive(deadline=deadline)[0].read_body(body_type)
    except DeadlineExceeded as error:
        raise deadline.error(waited_for) from error


class _Leader:
    def __init__(
        self, parts: Parts, form: Form[Any], make_word: Callable[[], bytes], describe: Describe, deadline: Deadline
    ) -> None:
        self._parts = parts
        self._form = form
        self._make_word = make_word
        self._describe = describe
        self._deadline = deadline
        self._others = [rank for rank in range(len(parts.cards)) if rank != parts.rank]
        self._expected: dict[int, Expectation] = {}
        self._came: dict[int, Connection] = {}
        self._left: set[int] = set()

    def lead(self) -> tuple[Any, bytes]:
        self._parts.endpoint.open_room(_room(self._parts))
        try:
            word = b""
            while True:
                self._gather()
                if self._came and not word:
                    word = self._make_word()
                made = self._propose(word)
                if made is not None:
                    return made, word
        except DeadlineExceeded as error:
            self._tell_all(LeaderGaveUp(str(error)), Deadline(LAST_WORD_S, "regroup"))
            raise
        finally:
            self._parts.endpoint.close_room(_room(self._parts))
            for expectation in self._expected.values():
                expectation.close()
            for connection in self._came.values():
                connection.close()

    def _gather(self) -> None:
        """Until everybody has come, or died."""
        told = ""
        while missing := self._look_around():
            text = ", ".join(map(self._said_of, missing))
            if text != told:
                self._tell_all(Missing(text), self._deadline)
                told = text
                continue
            lifelines = [self._parts.health.lifelines(self._parts.cards[rank].member) for rank in missing]
            wanted: Wanted = [
                *((self._expected[rank].fileno(), READ) for rank in missing),
                *((connection.fileno(), READ) for connection in self._came.values()),
                *(line for lines in lifelines for line in lines),
            ]
            PLAIN.wait_any(wanted, self._deadline, text)

    def _said_of(self, rank: int) -> str:
        name = self._describe(self._parts.cards[rank])
        return f"{name} to come back (it came, and gave up)" if rank in self._left else f"{name} to come"

    def _look_around(self) -> list[int]:
        """Let in who has come, and forget who has gone; the ranks that are still waited for."""
        missing = []
        for rank in self._others:
            if rank in self._came and is_ready(self._came[rank].fileno(), READ):
                self._forget(rank)  # nobody speaks before there is a plan: that is the end of it
            if rank not in self._came:
                if rank not in self._expected:
                    self._expected[rank] = self._parts.endpoint.expect(f"{_room(self._parts)}/{rank}")
                if self._expected[rank].is_there():
                    self._welcome(rank)
            if rank not in self._came and _lives(self._parts, rank):
                missing.append(rank)
        return missing

    def _welcome(self, rank: int) -> None:
        connection, visitor = self._expected.pop(rank).take()
        card = self._parts.cards[rank]
        if (visitor.member, visitor.fingerprint) == (card.member, card.fingerprint):
            self._came[rank] = connection
        else:
            connection.close()

    def _propose(self, word: bytes) -> Any:
        """The group, if it is there on all who have come."""
        ranks = tuple(sorted([self._parts.rank, *self._came]))
        plan = SuccessionPlan(ranks, f"{self._parts.name}~{secrets.token_hex(4)}", word)
        self._tell_all(plan, self._deadline)
        made = _try(self._form, plan)
        try:
            if self._all_formed() and made is not None and len(self._came) == len(ranks) - 1:
                self._tell_all(Go(), self._deadline)
                found, made = made, None
                return found
        finally:
            if made is not None:
                made.close()
        return None

    def _all_formed(self) -> bool:
        outcomes = []
        for rank, connection in list(self._came.items()):
            try:
                name = self._describe(self._parts.cards[rank])
                outcomes.append(
                    _read(connection, SuccessionOutcome, self._deadline, f"{name} to form the next group").formed
                )
            except ConnectionLost:
                self._forget(rank)
        return all(outcomes)

    def _tell_all(self, order: Any, deadline: Deadline) -> None:
        for rank, connection in list(self._came.items()):
            try:
                ORDERING.reach(type(order).__name__)
                connection.send("order", order, deadline=deadline)
            except ConnectionLost:
                self._forget(rank)

    def _forget(self, rank: int) -> None:
        self._came.pop(rank).close()
        self._left.add(rank)


def name_of_next(name: str, members: Sequence[str], count: int) -> str:
    """Of a group after the one of this name: the same on all its members, without a word between them, and another for
    each of the groups that they form."""
    digest = hashlib.sha256(",".join(members).encode()).hexdigest()[:8]
    base, _, generation = name.partition("~")
    return f"{base}~{int(generation.partition('.')[0] or 0) + 1}.{digest}.{count}"
