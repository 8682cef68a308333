"""A worker's way to the server group: sends each server its part of an errand, and goes on asking until all is done.

A server may die, and ranges move, at any moment: the client waits for the next placement and asks whoever is primary
then. What was pushed is kept by the caller until the errand is done, so nothing is lost, and nothing counts twice.

Every wait has a deadline, and `check` is called while waiting: what it raises ends the errand. Used by one thread at a
time; `adopt` from any.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
import torch

from paceline.errors import ConnectionLost, DeadlineExceeded, ProtocolError, RequestRefused, Unserved, WireError
from paceline.placement.placement import Placement
from paceline.server.errand import Errand
from paceline.server.errors import Superseded
from paceline.server.messages import Refusal, RequestFailed, ServerAnswer, ServerRequest
from paceline.server.parcels import Detail, Parcel
from paceline.server.post import ROOM, Memories, Postbox
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Endpoint
from paceline.wire.memory import Arena, SharedMemory, total_bytes
from paceline.wire.reaching import reach
from paceline.wire.waiting import PLAIN, Waiter, Wanted

logger = logging.getLogger("paceline.server")

ERRAND_S = 120.0
DIAL_S = 5.0
ORPHAN_DIAL_S = 2.0  # of who has little time, and knows that some are gone
LAST_WORD_S = 5.0
_SLICE_S = 0.1  # between two looks at whether a wait is still worth it
_SHORTEST_S, _LONGEST_S = 0.0005, 0.05  # between two tries

Pack = Callable[[ServerRequest], Parcel]


class Check(Protocol):
    def __call__(self) -> object: ...


def _nothing() -> None:
    pass


class GroupClient:
    """`on_empty` is called for ranges that are empty, again and again until they are loaded, and may load them."""

    def __init__(
        self, endpoint: Endpoint, *, check: Check = _nothing, on_empty: Callable[[set[int]], None] | None = None
    ) -> None:
        self._endpoint = endpoint
        self._check = check
        self.on_empty = on_empty
        self.settled: Callable[[], int] = int  # below which all leases of the epoch are known to be done
        self._changed = threading.Condition()
        self._placement = Placement()
        self._memory = SharedMemory.create(total_bytes())
        self._arena = Arena(self._memory, 0)
        self._memories = Memories()
        self._memories.add(self._memory)
        self._lines: dict[str, Postbox] = {}
        self._owing: set[str] = set()  # servers that have not answered yet
        self._twins: list[GroupClient] = []
        self._began: float | None = None  # the errand under way
        self._seen: dict[str, int] = {}  # how many updates each server had made when it was last pulled from

    # -- memory and placement ----------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that servers on this host read and write where it lies."""
        return self._arena.empty(shape, dtype)

    @property
    def placement(self) -> Placement:
        return self._placement

    @property
    def waited_s(self) -> float:
        """How long the errand under way has taken; 0 without one."""
        return time.monotonic() - self._began if self._began is not None else 0.0

    @property
    def is_near(self) -> bool:
        """Whether all servers that were asked so far are on this host."""
        return bool(self._lines) and all(line.connection.is_local for line in self._lines.values())

    def adopt(self, placement: Placement) -> None:
        with self._changed:
            if placement.version > self._placement.version:
                self._placement = placement
                self._changed.notify_all()
            twins = list(self._twins)
        for twin in twins:
            twin.adopt(placement)

    def twin(self, check: Check) -> GroupClient:
        """Another way to the same servers, for another thread; whoever asks for it closes it."""
        twin = GroupClient(self._endpoint, check=check)
        with self._changed:
            self._twins.append(twin)
            placement = self._placement
        twin.adopt(placement)
        return twin

    def wait_for_founding(self, founding: int, deadline: Deadline) -> Placement:
        """The placement of a founding of the run, or of a later one."""
        with self._changed:
            while self._placement.founding < founding:
                self._check()
                deadline.check(f"a placement on servers (founding {founding})")
                self._changed.wait(_SLICE_S)
            return self._placement

    # -- errands -----------------------------------------------------------------------------------------------------

    def run(
        self,
        errand: Errand,
        pack: Pack,
        what: str,
        seconds: float = ERRAND_S,
        *,
        is_enough: Callable[[], bool] | None = None,
    ) -> None:
        """Do an errand; `pack` gives the parcel of each request. What was wanted is there when this returns, unless
        `is_enough`, asked between two tries, said that what is done suffices."""
        deadline = Deadline(seconds, what)
        pause_s = _SHORTEST_S
        is_first = self._began is None  # one may be made in the middle of another
        self._began = time.monotonic() if is_first else self._began
        try:
            while True:
                placement = self._placement
                errand.settle(self.settled())
                self._exchange(errand, placement, pack, deadline)
                if errand.is_done or (is_enough is not None and is_enough()):
                    return
                self._look_at_refusals(errand, deadline)
                self._wait_for_news(placement, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_S)
        except BaseException:
            for server in list(errand.under_way):
                self._break_off(server)
            raise
        finally:
            self._began = None if is_first else self._began

    def _wait_for_news(self, seen: Placement, pause_s: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._placement is not seen, pause_s)

    def _exchange(self, errand: Errand, placement: Placement, pack: Pack, deadline: Deadline) -> None:
        sent: dict[str, Parcel] = {}
        for server, request in errand.requests(placement).items():
            parcel = pack(request)
            whole = msgspec.structs.replace(request, seen=self._seen.get(server, -1), detail=parcel.detail)
            try:
                line = self._line(server, placement, ORPHAN_DIAL_S if errand.is_orphaned else DIAL_S)
                line.send(whole, parcel.tensors, parcel.wanted, deadline=deadline)
                self._owing.add(server)
                sent[server] = parcel
            except WireError as error:
                self._lose(server, errand, error, deadline)
        for server, parcel in sent.items():
            try:
                parcel.given = errand.answered(server, self._receive(server, parcel, deadline))
            except WireError as error:
                self._lose(server, errand, error, deadline)

    def _receive(self, server: str, parcel: Parcel, deadline: Deadline) -> ServerAnswer:
        letter = self._lines[server].receive(deadline=deadline)
        self._owing.discard(server)
        answer = letter.message
        if isinstance(answer, RequestFailed):
            raise RequestRefused(f"{deadline.operation}: server {server} refused: {answer.text}")
        if not isinstance(answer, ServerAnswer):
            raise ProtocolError(f"server {server} answered a request with {type(answer).__name__}")
        if parcel.wanted:
            self._seen[server] = answer.updates
        tensors = letter.tensors
        if parcel.detail.exports:
            parcel.answer = Parcel(answer.detail or Detail(), tensors)
        elif parcel.detail.refreshes:
            detail = answer.detail or Detail()
            first = len(tensors) - 2 * len(detail.rows)
            parcel.answer = Parcel(detail, tensors[first:])
            tensors = tensors[:first]
        if not parcel.detail.exports:
            for wanted, tensor in zip(parcel.wanted, tensors, strict=False):  # none where it wrote in place
                wanted.copy_(tensor)
        return answer

    def _lose(self, server: str, errand: Errand, error: WireError, deadline: Deadline) -> None:
        errand.lost(server)
        self._break_off(server)
        deadline.check(f"server {server} ({error})")

    def _look_at_refusals(self, errand: Errand, deadline: Deadline) -> None:
        self._check()
        if forlorn := errand.forlorn(self._placement):
            raise Unserved(f"{deadline.operation}: no server that can be reached has the ranges {_few(forlorn)}")
        if Refusal.STALE in errand.refusals.values():
            raise Superseded(f"{deadline.operation}: its generation is over")
        empty = {number for number, refusal in errand.refusals.items() if refusal is Refusal.EMPTY}
        if empty and self.on_empty is not None:
            self.on_empty(empty)
        if deadline.expired():
            raise Unserved(
                f"{deadline.operation}: waited {deadline.seconds:g} s for ranges {_few(errand.left)}; "
                f"{_reasons(errand)}; see the log of the servers"
            )

    # -- connections -------------------------------------------------------------------------------------------------

    def hang_up(self) -> None:
        """Dial every server anew: who is gone without a word does not answer that, and is not waited for."""
        for server in list(self._lines):
            self._hang_up(server)

    def _line(self, server: str, placement: Placement, dial_s: float) -> Postbox:
        if server not in self._lines:
            waiter = _Watching(self, server)
            deadline = Deadline(dial_s, f"reaching server {server}")
            mine = self._endpoint.credentials
            purpose = f"{ROOM}/{mine.identity.member}"
            connection = reach(mine, placement.card_of[server], purpose, deadline=deadline, waiter=waiter)
            connection.waiter = waiter
            self._lines[server] = Postbox(connection, self._memories)
        return self._lines[server]

    def _break_off(self, server: str) -> None:
        """Hang up on who has not answered: what is still to come would be taken for the answer to the next request. On
        this host it may yet write where it was asked to, also if it is no server any more: so first let it have its
        last word, or be gone, which whoever started it sees to."""
        line = self._lines.get(server)
        try:
            if line is not None and line.connection.is_local and server in self._owing:
                line.connection.waiter = PLAIN
                line.receive(deadline=Deadline(LAST_WORD_S, "breaking off"))
        except DeadlineExceeded:
            logger.warning("server %s neither answers nor ends; what it writes from now on may do harm", server)
        except WireError:
            pass
        finally:
            self._hang_up(server)

    def _hang_up(self, server: str) -> None:
        self._owing.discard(server)
        if (line := self._lines.pop(server, None)) is not None:
            line.close()

    def check(self) -> None:
        """Raise if there is no use in waiting at all."""
        self._check()

    def look(self, server: str) -> None:
        """Raise if there is no use in waiting for this server."""
        self._check()
        if server not in self._placement.card_of:
            raise ConnectionLost(f"server {server} is gone, as placement {self._placement.version} says")

    def close(self) -> None:
        self.hang_up()
        self._memory.close()


class _Watching(Waiter):
    """Waits in slices, and looks in between whether it is still worth it."""

    def __init__(self, client: GroupClient, server: str) -> None:
        self._client = client
        self._server = server

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        while True:
            part = Deadline(min(_SLICE_S, max(deadline.remaining_s(), 1e-3)), deadline.operation)
            try:
                PLAIN.wait_any(wanted, part, waited_for)
                return
            except TimeoutError:
                if deadline.expired():
                    raise deadline.error(waited_for) from None
                self._client.look(self._server)


def _few(numbers: set[int]) -> str:
    listed = sorted(numbers)
    return ", ".join(map(str, listed[:8])) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _reasons(errand: Errand) -> str:
    found = {refusal.name.lower() for refusal in errand.refusals.values()}
    return f"the last answers were: {', '.join(sorted(found))}" if found else "nobody answered"
