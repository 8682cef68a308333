"""A server's shell: turns letters into requests and forwards for its keeper, and what the keeper leaves into letters.

Threads: one for each connection (a worker's, or that of another server that forwards), one for each replica that is
fed. One lock guards the keeper and the tensors; who needs acknowledgements waits for them without it.

Failure: what a request raises (a gradient that is not finite, no memory for new rows) goes back as `RequestFailed`;
nothing was changed then. A connection that breaks ends its thread. A replica that cannot be reached is tried again
until a placement says that it is gone.

A server that could not finish an update, follow its primary, bring up a replica or take in a letter, as a rule for want
of memory, *fails*: it answers nothing any more, says why, and ends. What it had acknowledged its replicas have; what
it had not is asked of them again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Callable

import msgspec
import torch

from paceline.control.messages.members import Serving
from paceline.errors import PacelineError, ProtocolError, WireError
from paceline.fault_points import SERVER_CLOSING, FaultPoint
from paceline.placement.placement import Placement
from paceline.server.errors import HalfMade
from paceline.server.keeper import PendingAnswer, RangeKeeper
from paceline.server.messages import Acknowledged, ApplyLease, Forward, RequestFailed, ServerAnswer, ServerRequest
from paceline.server.metering import Meter
from paceline.server.parcels import Detail, Parcel
from paceline.server.post import ROOM, Letter, Memories, Postbox
from paceline.server.store import TensorStore
from paceline.wire.card import Card
from paceline.wire.connection import Connection
from paceline.wire.deadline import Deadline
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Visitor
from paceline.wire.reaching import reach

logger = logging.getLogger("paceline.server")

IDLE_S = 24 * 3600.0  # a worker may compute for long between two requests
ANSWER_S = 60.0
ADOPT_S = 30.0  # for a placement that another server knows already
REDIAL_S = 0.05
REMEDY = "give it more memory, or the run more servers (paceline join CODE --servers 1 -n 0)"
STORE: FaultPoint[[], TensorStore] = FaultPoint("a server makes what holds its tensors")
KEEPER: FaultPoint[[str, TensorStore], RangeKeeper] = FaultPoint("a server makes what decides for its ranges")
NUM_BUCKETS = 8  # of the histogram of staleness: 0, 1, 2 to 3, 4 to 7, ...


def _ignore(_: str) -> None:
    """For services that are not a process."""


class ServerService:
    """Serves from when it is made until `close`. `on_change` is called, without the lock, when what the coordinator
    should know may have changed; `on_failure` when this server must end: it is not what it is taken for."""

    def __init__(
        self, endpoint: Endpoint, on_change: Callable[[], None], on_failure: Callable[[str], None] = _ignore
    ) -> None:
        self._endpoint = endpoint
        self._me = endpoint.credentials.identity.member
        self.store = STORE.reach() or TensorStore()
        self._keeper = KEEPER.reach(self._me, self.store) or RangeKeeper(self._me, self.store)
        self._on_change = on_change
        self._on_failure = on_failure
        self._has_failed = False
        self._changed = threading.Condition()
        self._memories = Memories()
        self._feeders: dict[str, threading.Thread] = {}
        self._connections: set[Connection] = set()
        self._num_workers = 0  # connections of workers
        self._alone_since = time.monotonic()  # where there is none
        self._meter = Meter(time.monotonic)
        self._num_updates = 0
        self._staleness = [0] * NUM_BUCKETS
        self._is_closed = False
        endpoint.open_room(ROOM, self._welcome)

    # -- what the coordinator says and hears -------------------------------------------------------------------------

    def adopt(self, placement: Placement) -> None:
        with self._changed:
            if self._has_failed:
                return
            try:
                self._keeper.adopt(placement)
            except Exception as error:
                self._fail(f"it could not go by placement {placement.version}: {_words(error)}")
                return
            for server in self._keeper.links:
                if server not in self._feeders:
                    feeder = threading.Thread(target=self._feed, args=(server,), name="paceline-feeder", daemon=True)
                    self._feeders[server] = feeder
                    feeder.start()
            self._changed.notify_all()
        self._on_change()

    def serving(self) -> Serving:
        with self._changed:
            heard = self._keeper.heard()
            measured = self._meter.look()
            return Serving(
                heard.version,
                tuple(sorted(heard.synced)),
                tuple(sorted(heard.handed)),
                self.store.num_keys,
                self.store.num_bytes,
                measured.busy,
                tuple(self._staleness) if any(self._staleness) else (),
                measured.number,
                dict(measured.costs),
            )

    def alone_s(self) -> float:
        """How long no worker has been connected."""
        with self._changed:
            return 0.0 if self._num_workers else time.monotonic() - self._alone_since

    # -- workers -----------------------------------------------------------------------------------------------------

    def _welcome(self, connection: Connection, visitor: Visitor) -> None:
        is_worker = visitor.role == "worker"
        with self._changed:
            if self._is_closed:
                connection.close()
                return
            self._connections.add(connection)
            self._num_workers += is_worker
        connection.notice_dead_path(ANSWER_S)  # one whose host is lost sends no word of its end
        postbox = Postbox(connection, self._memories)
        try:
            while True:
                letter = postbox.receive(deadline=Deadline(IDLE_S, f"serving {connection.peer}"))
                self._handle(postbox, letter, visitor)
        except WireError as error:
            logger.debug("%s: %s", connection.peer, error)
        except MemoryError as error:
            with self._changed:
                self._fail(f"it has no memory for what {connection.peer} sends: {error}; {REMEDY}")
        except Exception:
            logger.exception("serving %s failed", connection.peer)
        finally:
            postbox.close()
            with self._changed:
                self._connections.discard(connection)
                self._num_workers -= is_worker
                self._alone_since = time.monotonic() if is_worker else self._alone_since

    def _handle(self, postbox: Postbox, letter: Letter, visitor: Visitor) -> None:
        deadline = Deadline(ANSWER_S, f"answering {postbox.connection.peer}")
        try:
            if isinstance(letter.message, Forward):
                parcel = Parcel(letter.message.detail, letter.tensors)
                postbox.send(self._take(visitor.member, letter.message, parcel, deadline), deadline=deadline)
                return
            if not isinstance(letter.message, ServerRequest):
                raise ProtocolError(f"{postbox.connection.peer} sent {type(letter.message).__name__} unasked")
            outcome = self._serve(letter.message, Parcel(letter.message.detail, letter.tensors, letter.wanted))
            answer = self._wait_for_replicas(outcome, deadline)
        except (ValueError, MemoryError, RuntimeError, IndexError, KeyError) as error:
            logger.warning("a request of %s was refused: %s", postbox.connection.peer, error)
            where = f"process {os.getpid()} on {platform.node()}"
            postbox.send(RequestFailed(f"{_words(error)} ({where})"), deadline=deadline)
            return
        tensors = [] if letter.is_in_place else letter.wanted
        if outcome.parcel is not None:
            answer = msgspec.structs.replace(answer, detail=outcome.parcel.detail)
            tensors = [*tensors, *outcome.parcel.tensors]
        postbox.send(answer, tensors, deadline=deadline)

    def _serve(self, request: ServerRequest, parcel: Parcel) -> PendingAnswer:
        with self._changed:
            began = time.monotonic()
            if self._has_failed:
                raise WireError("this server has failed")
            self.store.check(parcel)
            try:
                outcome = self._keeper.serve(request, parcel)
            except HalfMade as error:
                self._fail(f"{error}; {REMEDY}")
                raise WireError("this server has failed") from error
            if isinstance(request.push, ApplyLease):
                self._count(request)
            seconds = time.monotonic() - began
            self._changed.notify_all()
        if request.exports:
            self._meter.add_other(seconds)
        else:
            partitions = self.store.tables.partitions
            self._meter.add(seconds, request.ranges, parcel, partitions, push=request.push, commit=request.commit)
        return outcome

    def _count(self, request: ServerRequest) -> None:
        """How many updates came between what this one was computed with and itself."""
        if request.seen >= 0:
            missed = max(0, self._num_updates - request.seen)
            self._staleness[min(missed.bit_length(), NUM_BUCKETS - 1)] += 1
        self._num_updates += 1

    def _wait_for_replicas(self, outcome: PendingAnswer, deadline: Deadline) -> ServerAnswer:
        with self._changed:
            self._changed.wait_for(
                lambda: self._is_closed or self._keeper.is_released(outcome.waits), deadline.remaining_s()
            )
            if not self._keeper.is_released(outcome.waits):
                raise deadline.error(f"the replicas {', '.join(outcome.waits)} to take what was pushed")
            return msgspec.structs.replace(self._keeper.finish(outcome), updates=self._num_updates)

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _take(self, sender: str, forward: Forward, parcel: Parcel, deadline: Deadline) -> Acknowledged:
        with self._changed:
            known = self._changed.wait_for(
                lambda: self._keeper.placement.version >= forward.version or self._is_closed, ADOPT_S
            )
            if not known or self._is_closed:
                raise deadline.error(f"placement {forward.version}, which {sender} knows already")
            if self._has_failed:
                raise WireError("this replica has failed")
            began = time.monotonic()
            try:
                message = self._keeper.take(sender, forward, parcel)
            except Exception as error:
                # What the primary has made is not here: this server must not be taken for one that has it.
                self._fail(f"a change that server {sender} made could not be made here: {_words(error)}; {REMEDY}")
                raise WireError("this replica has failed") from error
            seconds = time.monotonic() - began
        if forward.snapshot:
            self._meter.add_other(seconds)
            self._on_change()
        else:
            partitions = self.store.tables.partitions
            self._meter.add(seconds, forward.ranges, parcel, partitions, push=forward.push, commit=forward.commit)
        return message

    def _feed(self, server: str) -> None:
        """Bring one replica everything that the keeper has for it, in order, until it is none any more."""
        sent = 0
        complaint = ""
        postbox: Postbox | None = None
        while True:
            batch = self._next_batch(server, sent)
            if batch is None:
                break
            try:
                if postbox is None:
                    postbox = self._dial(server)
                sent = self._send_batch(postbox, server, batch)
                complaint = ""
            except Exception as error:  # whatever it is: who waits for this replica waits for ever without a feeder
                level = logging.INFO if isinstance(error, PacelineError) else logging.ERROR
                level = logging.DEBUG if str(error) == complaint else level  # who is gone is tried until it is known
                complaint = str(error)
                logger.log(level, "feeding %s: %s", server, error, exc_info=level == logging.ERROR)
                if postbox is not None:
                    postbox.close()
                postbox, sent = None, 0
                self._pause()
        if postbox is not None:
            postbox.close()

    def _next_batch(self, server: str, sent: int) -> list[tuple[Forward, Parcel]] | None:
        def news() -> list[tuple[Forward, Parcel]] | None:
            link = self._keeper.links.get(server)
            if link is None or self._is_closed:
                return None
            return [one for one in link.queue if one[0].number > sent]

        with self._changed:
            while (batch := news()) == []:
                self._changed.wait(1.0)
            if batch is None:
                self._feeders.pop(server, None)
            return batch

    def _dial(self, server: str) -> Postbox:
        with self._changed:
            card: Card | None = self._keeper.placement.card_of.get(server)
        if card is None:
            raise WireError(f"nobody says where server {server} is")
        mine = self._endpoint.credentials
        deadline = Deadline(5.0, f"reaching server {server}")
        connection = reach(mine, card, f"{ROOM}/{mine.identity.member}", deadline=deadline)
        return Postbox(connection, self._memories)

    def _send_batch(self, postbox: Postbox, server: str, batch: list[tuple[Forward, Parcel]]) -> int:
        deadline = Deadline(ANSWER_S, f"feeding server {server}")
        sent = 0
        for forward, parcel in batch:
            detail, tensors = _pushed(parcel) if parcel is not None else (Detail(), [])
            postbox.send(msgspec.structs.replace(forward, detail=detail), tensors, deadline=deadline)
            message = postbox.receive(deadline=deadline).message
            if not isinstance(message, Acknowledged):
                raise WireError(f"server {server} answered a forward with {message}")
            sent = forward.number
            with self._changed:
                try:
                    self._keeper.acknowledged(server, message)  # and take the state of the next range for it
                except Exception as error:
                    self._fail(f"it could not bring up server {server}: {_words(error)}; {REMEDY}")
                    raise WireError("this server has failed") from error
                self._changed.notify_all()
            self._on_change()
        return sent

    def _pause(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, REDIAL_S)

    def _fail(self, cause: str) -> None:
        """This server must end; called with the lock."""
        if not self._has_failed:
            self._has_failed = True
            logger.error("this server fails: %s", cause, exc_info=True)
            self._on_failure(cause)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        SERVER_CLOSING.reach(self)
        self._endpoint.close_room(ROOM)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            connections = list(self._connections)
            feeders = list(self._feeders.values())
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(2)
        for feeder in feeders:
            feeder.join(2.0)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _pushed(parcel: Parcel) -> tuple[Detail, list[torch.Tensor]]:
    """Without what the worker wants to know: that is between it and the primary."""
    detail, tensors = parcel.detail, parcel.tensors
    asked = [want.ids for want in detail.row_wants] + [one.ids for one in detail.refreshes]
    if asked:  # the ids of what is wanted are the last tensors
        tensors = tensors[: min(asked)]
    detail = msgspec.structs.replace(
        detail, wants=(), row_wants=(), exports=False, squares=None, stamps=-1, refreshes=()
    )
    return detail, tensors
