"""Whether a group can still work, and the wait that ends when it cannot.

Every member has a *watch* connection to every other, for small notes only, and on one host also the other's pidfd.
Every wait of the group polls, beside what it waits for, all of these and the group's alarm. So a death is seen at
once by every member that waits, also by those that were not talking to the dead one.

A note says goodbye (a member closed the group, in order), or passes a failure on: who sees a member die, a mismatch
or an abort tells the others before it raises. So nobody takes the second member to go for the first. A member that
has waited for `ROLL_CALL_MS` tells the others what it waits in: members that are in different operations, waiting for
each other on different paths, find out that way.

Invariant: a group fails once; the first failure is kept, and every wait and later call raises it.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec

from paceline.collective.signature import Numbered, Signature, is_own_fault
from paceline.errors import (
    DeadlineExceeded,
    GroupAborted,
    GroupClosed,
    GroupError,
    Mismatch,
    PeerLost,
    WireError,
)
from paceline.wire.card import Card
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import Fd, eventfd
from paceline.wire.waiting import READ, Wanted, is_ready

NOTE_S = 0.5  # a note is small and sent whole; only a peer that died inside one lets us wait
ATTRIBUTION_S = 0.05
PUT_OFF_MS = 100
ROLL_CALL_MS = 250
REMEMBERED = 64
MAX_REASON = 4096
DIED = "died"
SAME_CALLS = "every member must call the same operations in the same order with tensors that fit"
OWN_FAULT = "no script can cause this: it is a fault of Paceline; please report it with the logs of both"


class GroupFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Why a group ended; one of "lost", "mismatch", "fault" (a mismatch that is our own doing), "aborted", "closed".
    `rank` is who was lost, or who says so; `number` the operation in which whoever says so was; `died` that the kernel
    has seen the end of who was lost."""

    kind: str
    text: str
    rank: int
    number: int = 0
    died: bool = False


class Goodbye(msgspec.Struct, frozen=True, tag="goodbye"):
    pass


class WaitingFor(msgspec.Struct, frozen=True, tag="waiting"):
    at: Numbered


Note = GroupFailure | Goodbye | WaitingFor


class _Peer:
    def __init__(self, watch: Connection, pidfd: Fd | None) -> None:
        self.watch = watch
        self.pidfd = pidfd
        self.departed = False

    def descriptors(self) -> list[int]:
        if self.departed:
            return []
        found = [self.watch.fileno()]
        if self.pidfd is not None:
            found.append(self.pidfd.fileno())
        return found


class Health:
    """Shared by all threads of a member that use the group."""

    def __init__(self, name: str, cards: Sequence[Card], rank: int) -> None:
        self.name = name
        self.cards = cards
        self.rank = rank
        self.failure: GroupFailure | None = None
        self._alarm = eventfd()
        self._lock = threading.RLock()
        self._peers: dict[int, _Peer] = {}
        self._by_descriptor: dict[int, int] = {}
        self._version = 0
        self._polls = threading.local()
        # What this member did and what others say they do, by operation number, to be compared.
        self._mine: list[tuple[int, Signature | None]] = [(-1, None)] * REMEMBERED
        self._last = -1
        self._claims: OrderedDict[int, tuple[int, Signature]] = OrderedDict()
        self._told = -1
        self._busy = False
        self._later: GroupFailure | None = None

    # -- who is there ------------------------------------------------------------------------------------------------

    def watch(self, rank: int, connection: Connection, pidfd: Fd | None) -> None:
        with self._lock:
            self._peers[rank] = peer = _Peer(connection, pidfd)
            for descriptor in peer.descriptors():
                self._by_descriptor[descriptor] = rank
            self._version += 1

    def describe(self, rank: int) -> str:
        card = self.cards[rank]
        return f"{card.role} {card.member} (rank {rank})"

    def lifelines(self, member: str) -> list[tuple[int, int]]:
        """Descriptors and events that tell the end of a member, as (descriptor, events); for who forms the next
        group."""
        with self._lock:
            for rank, peer in self._peers.items():
                if self.cards[rank].member == member and not peer.watch.closed:
                    watch = (peer.watch.fileno(), select.POLLRDHUP)
                    return [watch] if peer.pidfd is None else [watch, (peer.pidfd.fileno(), READ)]
        return []

    def has_departed(self, rank: int) -> bool:
        return self._peers[rank].departed

    def has_ended(self, rank: int) -> bool:
        """Whether a member's process is known to have ended, or to have let go of the group. That the group failed for
        its sake does not say so: another connection to it may have broken."""
        failure = self.failure
        if failure is not None and failure.died and failure.rank == rank:
            return True
        lines = self.lifelines(self.cards[rank].member)
        return not lines or any(is_ready(*line) for line in lines)

    # -- failing -----------------------------------------------------------------------------------------------------

    def fail(self, kind: str, text: str, rank: int, *, tell: bool = True, died: bool = False) -> None:
        """End the group here, unless it has ended already, and tell the others."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = GroupFailure(kind, text[:MAX_REASON], rank, self._last, died)
            if self._alarm.number >= 0:
                os.eventfd_write(self._alarm.number, 1)
            if tell:
                self._tell_all(self.failure)

    def error(self, operation: str) -> GroupError:
        """The failure as a new exception for the caller of `operation`."""
        failure = self.failure
        assert failure is not None
        text = f"{operation} in group {self.name}: {failure.text}"
        if failure.kind == "lost":
            return PeerLost(text, member=self.cards[failure.rank].member, rank=failure.rank, died=failure.died)
        if failure.kind in ("mismatch", "fault"):
            return Mismatch(text, is_internal=failure.kind == "fault")
        return (GroupClosed if failure.kind == "closed" else GroupAborted)(text)

    def lost(self, rank: int, how: str) -> None:
        """A member is gone without a word of its own."""
        if not self._fail_as_learned():
            text = f"{self.describe(rank)} {how}; form a new group over the members that are left"
            self.fail("lost", text, rank, died=how == DIED)

    def died(self, rank: int) -> bool:
        """The kernel says that a neighbour's process ends, though its connections may still stand. Whether that is what
        ends the group."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is None or self.failure is not None:
                return False
            with contextlib.suppress(WireError):
                self._read_notes(rank, peer)  # it may have left in order before
            if not peer.departed:
                self.lost(rank, DIED)
            return self.failure is not None and self.failure.died

    def went_out(self, rank: int, _: str) -> None:
        """The beacon of a member on another host went out: the kernel there closed what its process held."""
        with self._lock:
            if self.failure is not None:
                return
            peer = self._peers.get(rank)
            if peer is not None:
                with contextlib.suppress(WireError):
                    self._read_notes(rank, peer)  # it may have left in order before
            if peer is None or not peer.departed:
                self.lost(rank, "was lost (its process ended)")

    def gone(self, rank: int, how: str, operation: str) -> GroupError:
        """A member is needed but went away: it left, or a connection to it broke. It may have gone because of
        another's failure, of which a note is on its way: give that a moment before blaming this one."""
        deadline = Deadline(ATTRIBUTION_S, operation)
        with contextlib.suppress(WireError, GroupError):
            while True:
                self.wait_any([], deadline, "the reason of a departure")
        self.lost(rank, "left the group" if self.has_departed(rank) else how)
        return self.error(operation)

    def left_in_order(self, rank: int, operation: str) -> bool:
        """Whether a member, a connection of which has ended, said goodbye; its note may be on the way."""
        deadline = Deadline(ATTRIBUTION_S, operation)
        with contextlib.suppress(DeadlineExceeded):
            while not self.has_departed(rank):
                self.wait_any([], deadline, "a goodbye")
        return self.has_departed(rank)

    def _fail_as_learned(self) -> bool:
        """Let a failure that was put off take effect."""
        if self._later is None:
            return False
        self.fail(self._later.kind, self._later.text, self._later.rank, tell=False, died=self._later.died)
        return True

    # -- comparing ---------------------------------------------------------------------------------------------------

    def enter(self, number: int, signature: Signature) -> None:
        """This member begins an operation; fails the group if another one said that it is in a different one."""
        self._mine[number % REMEMBERED] = (number, signature)
        self._last = number
        self._busy = True
        if self._claims:
            with self._lock:
                claim = self._claims.pop(number, None)
                if claim is not None:
                    self._compare(number, *claim)

    def leave(self) -> None:
        """The operation is over; what failed in a later one takes effect now."""
        self._busy = False
        self._fail_as_learned()

    def differ(
        self, rank: int, theirs: Signature | None, mine: Signature, number: int, their_number: int | None = None
    ) -> None:
        """Fail the group because two members differ."""
        said = str(theirs) if theirs is not None else "something unreadable"
        if their_number not in (None, number):
            said = f"operation {their_number}, {said},"
        is_ours = theirs is not None and is_own_fault(mine, theirs)
        remedy = OWN_FAULT if is_ours else SAME_CALLS
        text = (
            f"operation {number} is {mine} on {self.describe(self.rank)} but {said} on {self.describe(rank)}; {remedy}"
        )
        self.fail("fault" if is_ours else "mismatch", text, rank)

    def _compare(self, number: int, rank: int, theirs: Signature) -> None:
        known, mine = self._mine[number % REMEMBERED]
        if known == number and mine is not None:
            if mine != theirs:
                self.differ(rank, theirs, mine, number)
        elif number > self._last:
            self._claims[number] = (rank, theirs)
            if len(self._claims) > REMEMBERED:
                self._claims.popitem(last=False)

    def _roll_call(self) -> None:
        with self._lock:
            number, signature = self._mine[self._last % REMEMBERED]
            if signature is not None and number != self._told:
                self._told = number
                self._tell_all(WaitingFor(Numbered(number, signature)))

    # -- waiting -----------------------------------------------------------------------------------------------------

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        """As `Waiter` says; raises the group's failure. May return early when a member departed."""
        poll, version = self._poll()
        for descriptor, events in wanted:
            poll.register(descriptor, events)
        try:
            called = False
            while True:
                ready = {found for found, _ in poll.poll(self._patience_ms(deadline, called))}
                if self.failure is None and ready:
                    self._examine_all(ready)
                there = any(descriptor in ready for descriptor, _ in wanted)
                if self.failure is not None and not (there and self._may_finish()):
                    raise self.error(deadline.operation)
                if there or self._version != version:
                    return
                deadline.check(waited_for)
                if not ready and not self._fail_as_learned():
                    called = True
                    self._roll_call()
        finally:
            for descriptor, _ in wanted:
                with contextlib.suppress(KeyError):
                    poll.unregister(descriptor)

    def _patience_ms(self, deadline: Deadline, called: bool) -> int:
        """How long to wait for something to happen before looking at what else there is to do."""
        if self.failure is not None:
            return 0
        limit_ms = deadline.remaining_ms()
        if self._later is not None:
            return min(limit_ms, PUT_OFF_MS)
        return limit_ms if called else min(limit_ms, ROLL_CALL_MS)

    def _may_finish(self) -> bool:
        """What others sent before the group failed is good, and lets this member finish what they finished. An abort
        or a close here is the wish of this member, and ends its waits at once."""
        return self.failure is not None and self.failure.rank != self.rank

    def _poll(self) -> tuple[select.poll, int]:
        """This thread's poll object, which already watches everything that can end the group, and the version of the
        membership that it was made for."""
        if getattr(self._polls, "version", -1) != self._version:
            with self._lock:
                poll = select.poll()
                poll.register(self._alarm.fileno(), READ)
                for peer in self._peers.values():
                    for descriptor in peer.descriptors():
                        poll.register(descriptor, READ)
                self._polls.poll, self._polls.version = poll, self._version
        return self._polls.poll, self._polls.version

    def _examine_all(self, descriptors: Iterable[int]) -> None:
        """Read all notes first: they may explain why a member is gone. Who is gone without any has died."""
        with self._lock:
            ranks = {self._by_descriptor[descriptor] for descriptor in descriptors if descriptor in self._by_descriptor}
            gone = {rank: how for rank in ranks if (how := self._examine(rank)) is not None}
            for rank, how in gone.items():
                if not self._peers[rank].departed:
                    self.lost(rank, how)

    def _examine(self, rank: int) -> str | None:
        """Read the notes of one member; how it is gone, if it is."""
        peer = self._peers[rank]
        died = peer.pidfd is not None and is_ready(peer.pidfd.fileno(), READ)
        try:
            self._read_notes(rank, peer)
        except WireError as error:
            return DIED if died else f"was lost ({error})"
        return DIED if died else None

    def _read_notes(self, rank: int, peer: _Peer) -> None:
        while (
            not peer.departed
            and self.failure is None
            and (peer.watch.has_buffered() or is_ready(peer.watch.fileno(), READ))
        ):
            header, _ = peer.watch.receive(deadline=Deadline(NOTE_S, f"a note of {peer.watch.peer}"))
            note: Note = header.read_body(Note)  # type: ignore[arg-type]
            if isinstance(note, Goodbye):
                self._depart(peer)
            elif isinstance(note, GroupFailure):
                self._depart(peer)  # it will say no more, and its end is no news
                self._learn(note)
            else:
                self._compare(note.at.number, rank, note.at.signature)

    def _learn(self, note: GroupFailure) -> None:
        """Another member failed. If it is past the operation that this one is in, it has done its part of that, and
        most likely so has everybody: this one may finish it first, as long as it does not have to wait for long."""
        if self._busy and note.number > self._last and note.kind != "lost":
            self._later = note
            if not self._busy:  # it ended just now, and `leave` has not seen the note
                self._fail_as_learned()
        else:
            self.fail(note.kind, note.text, note.rank, tell=False, died=note.died)

    def _depart(self, peer: _Peer) -> None:
        for descriptor in peer.descriptors():
            self._by_descriptor.pop(descriptor, None)
        peer.departed = True
        self._version += 1

    # -- telling -----------------------------------------------------------------------------------------------------

    def _tell_all(self, note: Note) -> None:
        for peer in self._peers.values():
            if not peer.departed:
                # A peer that cannot take a note now is dead or will see the closed connection.
                with contextlib.suppress(WireError, ValueError):
                    peer.watch.send("note", note, deadline=Deadline(NOTE_S, f"a note to {peer.watch.peer}"))

    # -- the end -----------------------------------------------------------------------------------------------------

    def disown(self) -> None:
        """In a forked child, where another thread may have held the lock."""
        self._lock = threading.RLock()
        text = f"the group is that of process {os.getppid()}; a process forked from it has no part in it"
        self.failure = GroupFailure("closed", text, self.rank)

    def close(self) -> None:
        """Say goodbye and let go of everything."""
        with self._lock:
            self._tell_all(Goodbye())
            self.fail("closed", "the group was closed", self.rank, tell=False)
            for peer in self._peers.values():
                peer.watch.close()
                if peer.pidfd is not None:
                    peer.pidfd.close()
            self._by_descriptor.clear()

    def release(self) -> None:
        """After `close`, when no thread waits any more."""
        self._alarm.close()
