"""How members that know each other's cards become a group.

Of each two members the one with the higher rank dials the other, over the Unix socket when both are on one host, else
over TCP. That connection stays as their watch. On one host each then hands the other its memory, a pidfd of itself
and the signal it will wait for. A barrier ends it: when `form` returns, everybody is in.

It changes nothing of an older group, so it can run on another thread while that one works; it only looks at the
lifelines that one has, to see who dies before it has come here.

Failure: a member that is missing is a `DeadlineExceeded` that names it; one that dies meanwhile is a `PeerLost`. Who
fails tells those it has met. Either way nothing is left behind.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from paceline.collective.health import Health
from paceline.collective.links import Links
from paceline.collective.mailbox import Mailbox
from paceline.collective.memory_channel import MemoryChannel
from paceline.collective.neighbourhood import FIXED_BYTES, Neighbour, Neighbourhood, check_size, hold_lifelines
from paceline.errors import AddressError, ConnectionLost, DeadlineExceeded, HandshakeRefused
from paceline.wire.beacon import Watch, beacons_of
from paceline.wire.card import Card
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.descriptors import Fd, eventfd, pidfd_of_self
from paceline.wire.endpoint import Endpoint, Expectation
from paceline.wire.handover import receive_descriptors, send_descriptors
from paceline.wire.handshake import Visitor
from paceline.wire.lifeline import LifelineHolder
from paceline.wire.memory import Arena, SharedMemory, total_bytes, touch
from paceline.wire.reaching import reach
from paceline.wire.waiting import PLAIN, READ, Waiter, Wanted, is_ready

# A path between two hosts that carries nothing for so long is broken. It is as long as the coordinator waits for a
# member that is silent: both see at about the same time that a host is cut off altogether.
DEAD_PATH_S = 5.0

OwnedT = TypeVar("OwnedT", Fd, SharedMemory, Connection)


class Parts(msgspec.Struct, frozen=True):
    """What a group is made of."""

    name: str
    endpoint: Endpoint
    cards: tuple[Card, ...]
    rank: int
    health: Health
    memory: SharedMemory
    arena: Arena
    local: Neighbourhood
    links: Links
    mailbox: Mailbox
    watches: tuple[Watch, ...]

    def close(self, *, formed: bool = True) -> None:
        """Let go of everything but the endpoint; the health is released last, when no thread waits any more. A group
        that was not `formed` may be tried again under its name."""
        for watch in self.watches:
            watch.close()
        self.health.close()
        self.endpoint.close_room(room_of(self.name), opens_again=not formed)
        self.links.close()
        self.mailbox.close()
        self.local.close()
        self.health.release()


class Cancellation:
    """Lets another thread end the forming of a group that nobody wants any more."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._health: Health | None = None
        self._reason = ""

    def cancel(self, reason: str) -> None:
        with self._lock:
            self._reason = reason
            health = self._health
        if health is not None:
            health.fail("aborted", reason, health.rank)

    def watch(self, health: Health) -> None:
        """This is the group that is being formed."""
        with self._lock:
            self._health = health
            reason = self._reason
        if reason:
            health.fail("aborted", reason, health.rank)


def room_of(name: str) -> str:
    return f"group {name}"


def assemble(
    endpoint: Endpoint,
    cards: Sequence[Card],
    rank: int,
    name: str,
    deadline: Deadline,
    witness: Health | None = None,
    cancellation: Cancellation | None = None,
    reserve_bytes: int = 0,
    memory: SharedMemory | None = None,
) -> Parts:
    """Connect to all others. The `witness` is the health of an older group that knows some of them. `memory` from a
    `SpareMemory` belongs to the group from here on."""
    try:
        check_cards(endpoint, cards, rank)
    except ValueError:
        if memory is not None:
            memory.close()
        raise
    former = _Former(endpoint, tuple(cards), rank, name, deadline, witness, reserve_bytes, memory)
    try:
        if cancellation is not None:
            cancellation.watch(former.health)
        return former.assemble()
    except BaseException as error:
        former.give_up(error)
        raise


def check_cards(endpoint: Endpoint, cards: Sequence[Card], rank: int) -> None:
    if not 0 <= rank < len(cards):
        raise ValueError(f"rank {rank} is not one of 0..{len(cards) - 1}")
    if len({card.member for card in cards}) != len(cards):
        raise ValueError("a member is named twice in the cards of a group")
    if cards[rank].member != endpoint.credentials.identity.member:
        raise ValueError(f"the card at rank {rank} is not this member's; every member has exactly one rank")
    check_size(max(sum(card.host == other.host for other in cards) for card in cards))


class _Former:
    def __init__(
        self,
        endpoint: Endpoint,
        cards: tuple[Card, ...],
        rank: int,
        name: str,
        deadline: Deadline,
        witness: Health | None,
        reserve_bytes: int,
        memory: SharedMemory | None,
    ) -> None:
        self._endpoint = endpoint
        self._cards = cards
        self._rank = rank
        self._name = name
        self._deadline = deadline
        self._room = room_of(name)
        self.health = Health(name, cards, rank)
        self._witness = witness
        self._owned: list[Fd | SharedMemory | Connection] = []
        self._coming: dict[int, Expectation] = {}
        self._met = {rank}
        self._reserve_bytes = reserve_bytes
        self._ready_memory = memory
        self._holder: LifelineHolder | None = None
        self._toucher: threading.Thread | None = None
        endpoint.open_room(self._room)
        far = {number: card for number, card in enumerate(cards) if card.host != cards[rank].host}
        beacons = beacons_of(endpoint) if far else None
        self._watches = tuple(
            beacons.watch(card.member, functools.partial(self.health.went_out, number))
            for number, card in far.items()
            if beacons is not None
        )
        if beacons is not None:
            beacons.light(far.values())

    def assemble(self) -> Parts:
        memory = self._ready_memory or SharedMemory.create(FIXED_BYTES + total_bytes())
        self._owned.append(memory)
        self._holder = hold_lifelines(memory, sum(self._is_neighbour(rank) for rank in range(len(self._cards))) + 1)
        if self._ready_memory is None and self._reserve_bytes:  # while others are waited for
            arguments = (memory, FIXED_BYTES, self._reserve_bytes)
            self._toucher = threading.Thread(target=touch, args=arguments, name="paceline-touch", daemon=True)
            self._toucher.start()
        lower, higher = range(self._rank), range(self._rank + 1, len(self._cards))
        self._coming = {rank: self._endpoint.expect(self._purpose("watch", rank)) for rank in higher}
        inboxes = {rank: self._own(eventfd()) for rank in range(len(self._cards)) if self._is_neighbour(rank)}
        watches = {}
        for rank in lower:
            with self._blaming(rank):
                watches[rank] = self._own(self._dial(rank, "watch", self))
                self._hand_over(rank, watches[rank], memory, inboxes)
        neighbours = [self._meet(rank, watches[rank], inboxes) for rank in lower]
        while self._coming:
            for rank in self._wait_for_visitors():
                watch = self._own(self._checked(rank, *self._coming.pop(rank).take()))
                watch.waiter = self
                with self._blaming(rank):
                    self._hand_over(rank, watch, memory, inboxes)
                neighbours.append(self._meet(rank, watch, inboxes))
        self._finish_touching()
        near = [neighbour for neighbour in neighbours if neighbour is not None]
        arena = Arena(memory, FIXED_BYTES)
        channel = MemoryChannel(arena, {neighbour.rank: neighbour.memory for neighbour in near})
        return Parts(
            name=self._name,
            endpoint=self._endpoint,
            cards=self._cards,
            rank=self._rank,
            health=self.health,
            memory=memory,
            arena=arena,
            local=Neighbourhood(self.health, memory, near, self._holder),
            links=Links(self.health, self.connect),
            mailbox=Mailbox(self.health, self, channel),
            watches=self._watches,
        )

    def _finish_touching(self) -> None:
        if self._toucher is not None:
            self._toucher.join()

    def _own(self, owned: OwnedT) -> OwnedT:
        self._owned.append(owned)
        return owned

    def _is_neighbour(self, rank: int) -> bool:
        return rank != self._rank and self._cards[rank].host == self._cards[self._rank].host

    def _hand_over(self, rank: int, watch: Connection, memory: SharedMemory, inboxes: dict[int, Fd]) -> None:
        if self._is_neighbour(rank):
            if not watch.is_local:
                raise HandshakeRefused(
                    f"{self.health.describe(rank)} claims to be on this host but came over the network"
                )
            with contextlib.closing(pidfd_of_self()) as pidfd:
                send_descriptors(watch, [memory.descriptor, pidfd, inboxes[rank]], self._deadline)

    def _meet(self, rank: int, watch: Connection, inboxes: dict[int, Fd]) -> Neighbour | None:
        """Receive what the other hands over; from here on its death is noticed."""
        neighbour = None
        pidfd = None
        if self._is_neighbour(rank):
            with self._blaming(rank):
                theirs, pidfd, signal = map(self._own, receive_descriptors(watch, 3, self._deadline))
            memory = SharedMemory.attach(theirs)
            neighbour = Neighbour(rank, memory, outgoing=signal, incoming=inboxes[rank])
        watch.notice_dead_path(DEAD_PATH_S)
        watch.waiter = PLAIN  # from here on it is for notes, which the health reads while it waits for other things
        self._met.add(rank)
        self.health.watch(rank, watch, pidfd)
        return neighbour

    def _wait_for_visitors(self) -> list[int]:
        """The ranks, of those to come, that are here now; at least one."""
        missing = ", ".join(map(self.health.describe, self._coming))
        wanted = [(expectation.fileno(), READ) for expectation in self._coming.values()]
        try:
            self.wait_any(wanted, self._deadline, missing)
        except DeadlineExceeded as error:
            error.members = tuple(self._cards[rank].member for rank in self._coming)
            raise
        return [rank for rank, expectation in self._coming.items() if expectation.is_there()]

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        """As `Waiter` says; raises when a member of the group dies, whether it has come already or not."""
        while not any(is_ready(*one) for one in wanted):
            lifelines = {rank: self._lifelines(rank) for rank in range(len(self._cards)) if rank not in self._met}
            for rank, lines in lifelines.items():
                if any(is_ready(*line) for line in lines):
                    self.health.lost(rank, "died before it came to the group")
                    raise self.health.error(deadline.operation)
            lines = [line for lines in lifelines.values() for line in lines]
            self.health.wait_any([*wanted, *lines], deadline, waited_for)

    def _lifelines(self, rank: int) -> list[tuple[int, int]]:
        return self._witness.lifelines(self._cards[rank].member) if self._witness is not None else []

    @contextlib.contextmanager
    def _blaming(self, rank: int) -> Iterator[None]:
        """A connection that cannot be made or breaks is the loss of the member at its other end."""
        try:
            yield
        except (AddressError, ConnectionLost, HandshakeRefused) as error:
            if isinstance(error, HandshakeRefused) and not isinstance(error.__cause__, ConnectionLost):
                raise
            self.health.lost(rank, f"was lost ({error})")
            raise self.health.error(self._deadline.operation) from error

    # -- connections -------------------------------------------------------------------------------------------------

    def _purpose(self, kind: str, dialer: int) -> str:
        return f"{self._room}/{kind}/{dialer}"

    def _dial(self, rank: int, kind: str, waiter: Waiter, deadline: Deadline | None = None) -> Connection:
        card = self._cards[rank]
        return reach(
            self._endpoint.credentials,
            card,
            self._purpose(kind, self._rank),
            deadline=deadline or self._deadline,
            host=self._cards[self._rank].host,
            waiter=waiter,
            answer_s=DEAD_PATH_S,
        )

    def _checked(self, rank: int, connection: Connection, visitor: Visitor) -> Connection:
        card = self._cards[rank]
        if (visitor.member, visitor.fingerprint) != (card.member, card.fingerprint):
            connection.close()
            raise HandshakeRefused(f"{visitor.role} {visitor.member} came in place of {self.health.describe(rank)}")
        return connection

    def expect(self, rank: int, kind: str, *, keeps_ended: bool = False) -> Expectation:
        return self._endpoint.expect(self._purpose(kind, rank), keeps_ended=keeps_ended)

    def welcome(self, rank: int, expectation: Expectation) -> Connection:
        connection = self._checked(rank, *expectation.take())
        connection.waiter = self.health
        return connection

    def connect(self, rank: int, kind: str, deadline: Deadline, *, dials: bool) -> Connection:
        if dials:
            try:
                return self._dial(rank, kind, self.health, deadline)
            except (AddressError, ConnectionLost, HandshakeRefused) as error:
                raise self.health.gone(rank, f"was lost ({error})", deadline.operation) from error
        expectation = self.expect(rank, kind)
        while not expectation.is_there():
            if self.health.has_departed(rank):
                raise self.health.gone(rank, "left the group", deadline.operation)
            self.health.wait_any([(expectation.fileno(), READ)], deadline, self.health.describe(rank))
        return self.welcome(rank, expectation)

    def give_up(self, error: BaseException) -> None:
        """Tell those that are here already, and let go of everything."""
        for watch in self._watches:
            watch.close()
        self._finish_touching()
        me = self.health.describe(self._rank)
        self.health.fail("aborted", f"forming the group failed on {me}: {type(error).__name__}: {error}", self._rank)
        self.health.close()
        self._endpoint.close_room(self._room, opens_again=True)
        for expectation in self._coming.values():
            expectation.close()
        if self._holder is not None:
            self._holder.close()
        for owned in self._owned:
            owned.close()
        self.health.release()
