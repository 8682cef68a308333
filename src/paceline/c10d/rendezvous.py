"""How processes that share a c10d store become a group.

    each     seat/RANK, owner/RANK      counts and names who comes with this rank, again or as a second process
    each     here/RANK                  how many it expects, its public key; deleted when all cards are there
    rank 0   secret/KEY                 the group's secret, sealed for the owner of that key, who deletes it
    each     card/SESSION/RANK          where it is reached; the session is told by the secret; deleted in the end
    then all form the group over their own connections; the store is not needed any more

So nothing of a group that began is left for the next one over the same keys to take for its own; torch counts groups
from 0 in every world, and `registering` keeps groups of other members apart. A try that failed leaves its key: the rank
comes again with another, for which rank 0 seals the secret again. Two processes with one rank are a mistake: the later
of them is told, the earlier one goes on.

Failure: `StoreFailed` names the ranks that did not come, or says that the store is gone; `WrongCall` says which two
ranks disagree about the world's size, or which process has the rank already.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from paceline.c10d.errors import WrongCall
from paceline.c10d.options import LOOPBACK, Options, listening_address
from paceline.c10d.sealing import Seal
from paceline.collective import Group
from paceline.store.torch_store import StoreFailed
from paceline.wire.card import Card, this_host
from paceline.wire.deadline import MAX_SECONDS, Deadline
from paceline.wire.dialing import is_loopback
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from paceline.wire.identity import Identity

Body = TypeVar("Body")
_NOTHING = "?"  # which no key ever holds
TURN_S = 0.5  # after which rank 0 looks whether somebody has come anew
_tokens: dict[int, str] = {}


class _Owner(msgspec.Struct, frozen=True):
    """Who has a rank: a process, and where it runs."""

    process: str
    place: str


class _Here(msgspec.Struct, frozen=True):
    size: int
    public: bytes


class _Sealed(msgspec.Struct, frozen=True):
    """A secret, and the public key of who sealed it."""

    public: bytes
    secret: bytes


def _this_process() -> str:
    """Tells this process from all others that might come with its rank; a forked child is another one."""
    return _tokens.setdefault(os.getpid(), secrets.token_hex(8))


def form(store: Store, rank: int, size: int, *, name: str, timeout_s: float, options: Options = Options()) -> Group:
    """Come to the store, wait for the others, form the group; it owns what was opened here."""
    if not 0 <= rank < size:
        raise WrongCall(f"rank {rank} is not one of 0..{size - 1}: the world has {size} processes")
    deadline = Deadline(min(timeout_s, MAX_SECONDS), f"forming group {name} as rank {rank} of {size}")
    identity = Identity()
    if size == 1:
        endpoint = Endpoint(Credentials(identity, secrets.token_bytes(32), "worker"), host=LOOPBACK)
        return _form(endpoint, [Card.of(endpoint)], 0, name, deadline)
    board = _Board(store, rank, size, deadline)
    try:
        board.sit_down()
        secret = board.agree_on_secret()
        host, tls = listening_address(options, store)
        endpoint = Endpoint(Credentials(identity, secret, "worker"), host=host, tls=tls)
        try:
            cards = board.exchange("card", Card.of(endpoint, options.host_label), Card)
            _check_addresses(cards, rank)
        except BaseException:
            endpoint.close()
            raise
        group = _form(endpoint, cards, rank, name, deadline)
        board.clear("card")
        return group
    except BaseException:
        board.stand_up()
        raise


def _form(endpoint: Endpoint, cards: list[Card], rank: int, name: str, deadline: Deadline) -> Group:
    try:
        return Group.form(
            endpoint,
            cards,
            rank,
            name=name,
            timeout_s=deadline.seconds,
            forming_s=max(0.001, deadline.remaining_s()),
            ephemeral=True,
        )
    except BaseException:
        endpoint.close()
        raise


def _check_addresses(cards: list[Card], rank: int) -> None:
    for other, card in enumerate(cards):
        # Without the label, which keeps members of one machine apart.
        if card.host.split()[0] != this_host() and is_loopback(card.address[0]):
            raise WrongCall(
                f"rank {other} is on another host but listens on {card.address[0]} only, where rank {rank} cannot "
                "reach it; give the store by an address that all hosts reach, or "
                "pg_options=paceline.c10d.Options(host=ADDRESS) on each"
            )


class _Board:
    """The group's keys in the store."""

    def __init__(self, store: Store, rank: int, size: int, deadline: Deadline) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._deadline = deadline
        self._is_seated = False
        self._secret = b""
        self._seal = Seal()
        self._publics: list[bytes] = []

    def sit_down(self) -> None:
        """Take the rank, and see who has the others."""
        self._take_seat()
        self._write(f"here/{self._rank}", _Here(self._size, self._seal.public))
        for rank in range(self._size):
            here = self._read(f"here/{rank}", _Here)
            if here.size != self._size:
                raise WrongCall(
                    f"rank {rank} expects a world of {here.size} processes, rank {self._rank} one of {self._size}; "
                    "start all with the same world size"
                )
            self._publics.append(here.public)

    def _take_seat(self) -> None:
        with self._store_answers():
            is_first = self._store.add(f"seat/{self._rank}", 1) == 1
        self._is_seated = True
        if is_first:
            place = f"{os.getpid()} on {socket.gethostname()} ({this_host()[:4]})"
            self._write(f"owner/{self._rank}", _Owner(_this_process(), place))
            return
        owner = self._read(f"owner/{self._rank}", _Owner, only_of=self._rank)
        if owner.process != _this_process():
            raise WrongCall(
                f"rank {self._rank} is taken by process {owner.place}; give every process a rank of its own, and "
                "a restarted one a new store"
            )

    def stand_up(self) -> None:
        """After a try that failed: the rank is free for any process."""
        if self._is_seated:
            with contextlib.suppress(StoreFailed), self._store_answers():
                self._store.add(f"seat/{self._rank}", -1)

    def agree_on_secret(self) -> bytes:
        """The first rank draws it, and seals it for each of the others."""
        if self._rank:
            # With the key it was sealed by: that which the first rank left may be of a try before.
            sealed = self._read(self._secret_key(self._seal.public), _Sealed, only_of=0)
            self._secret = self._seal.open(sealed.secret, sealed.public)
            self._delete(self._secret_key(self._seal.public))
        else:
            self._secret = secrets.token_bytes(32)
            for rank in range(1, self._size):
                self._hand_secret_to(rank)
        return self._secret

    def _hand_secret_to(self, rank: int) -> None:
        theirs = self._publics[rank]
        sealed = _Sealed(self._seal.public, self._seal.close(self._secret, theirs))
        self._write(self._secret_key(theirs), sealed)

    def _secret_key(self, public: bytes) -> str:
        return f"secret/{public.hex()}"

    def exchange(self, what: str, mine: Body, body_type: type[Body]) -> list[Body]:
        """Leave one's own, and read all ranks', in the order of ranks."""
        place = self._place(what)
        self._write(f"{place}/{self._rank}", mine)
        if self._rank == 0:
            for rank in range(1, self._size):
                self._admit(rank, f"{place}/{rank}")
        found = [self._read(f"{place}/{rank}", body_type) for rank in range(self._size)]
        # All are past reading it; and nobody is past the forming of the group before it is gone.
        self._delete(f"here/{self._rank}")
        return found

    def clear(self, what: str) -> None:
        """After what all have read."""
        self._delete(f"{self._place(what)}/{self._rank}")

    def _place(self, what: str) -> str:
        session = hashlib.sha256(b"paceline c10d session" + self._secret).hexdigest()[:16]
        return f"{what}/{session}"

    def _admit(self, rank: int, key: str) -> None:
        """Wait until a rank, which has the secret, has left a key. What it had left before may be of a try that failed,
        and its key for the secret another now."""
        while not self._comes(key) and not self._deadline.expired():
            here = self._look(f"here/{rank}", _Here)
            if here is not None and here.public != self._publics[rank]:
                self._publics[rank] = here.public
                self._hand_secret_to(rank)

    def _comes(self, key: str) -> bool:
        with self._store_answers():
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, min(TURN_S, self._deadline.remaining_s()))))
            except (dist.DistError, RuntimeError):
                return bool(self._store.check([key]))  # raises if the store is gone
        return True

    def _delete(self, key: str) -> None:
        """Some stores cannot; then what is left there costs the next group a turn."""
        with contextlib.suppress(dist.DistError, RuntimeError, NotImplementedError, OSError):
            self._store.delete_key(key)

    def _write(self, key: str, body: object) -> None:
        with self._store_answers():
            self._store.set(key, msgspec.json.encode(body).decode())

    def _look(self, key: str, body_type: type[Body]) -> Body | None:
        """What is there now. `get` would wait for a key that its owner has just taken away."""
        with self._store_answers():
            found = self._store.compare_set(key, _NOTHING, _NOTHING)
            return None if found.decode() == _NOTHING else msgspec.json.decode(found, type=body_type)

    def _read(self, key: str, body_type: type[Body], *, only_of: int | None = None) -> Body:
        """What a rank, and it alone or each under its number, leaves under a key."""
        with self._store_answers():
            try:  # stores differ in what they raise when a key does not come
                self._store.wait([key], timedelta(seconds=max(0.001, self._deadline.remaining_s())))
            except (dist.DistError, RuntimeError) as error:
                missing = self._missing(key, only_of)  # raises if the store is gone
                if missing:
                    seconds = self._deadline.seconds
                    text = f"ranks {missing} did not come to the store within {seconds:g} s"
                    raise StoreFailed(f"{self._deadline.operation}: {text}") from error
            return msgspec.json.decode(self._store.get(key), type=body_type)

    def _missing(self, key: str, only_of: int | None) -> list[int]:
        """The ranks that have not left what one, or each of them, leaves under such a key."""
        if only_of is not None:
            return [] if self._store.check([key]) else [only_of]
        what = key.rpartition("/")[0]
        return [rank for rank in range(self._size) if not self._store.check([f"{what}/{rank}"])]

    @contextlib.contextmanager
    def _store_answers(self) -> Iterator[None]:
        """Whatever a store raises when it is gone, with what that means here."""
        try:
            yield
        except StoreFailed:
            raise
        except msgspec.DecodeError as error:
            raise StoreFailed(f"{self._deadline.operation}: the store holds something else: {error}") from error
        except (dist.DistError, RuntimeError, OSError) as error:
            raise StoreFailed(f"{self._deadline.operation}: the store is gone: {error}") from error
