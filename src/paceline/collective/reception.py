"""Who waits for which message: receives posted by any thread, each for a tag and a sender, or for whoever sends first.

A message goes to the first receive that asked for its tag, in the order of the calls; receives for different tags, or
from different senders, wait for nobody. One thread at a time *drives*: it polls the senders that somebody waits for
and reads what comes, for whomever it is. That is the caller's own thread if it waits and nobody drives already, else
one of the group's that exists from the first receive on which nobody waited.

A receive has no deadline before somebody waits for it; then its end, like that of any operation, ends the group.
A message under way is read to its end before the next one of any sender.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from concurrent.futures import Future

import torch

from paceline.collective.health import Health
from paceline.collective.mailbox import Inbox, Mailbox
from paceline.collective.sequencer import end_group
from paceline.errors import ConnectionLost, DeadlineExceeded, GroupError
from paceline.wire.deadline import MAX_SECONDS, Deadline
from paceline.wire.descriptors import eventfd
from paceline.wire.waiting import READ


class Receipt:
    """A receive that was posted; `source` is None for any sender. It may take `limit_s` from when somebody waits for
    it, and so may a message for it from its first byte."""

    __slots__ = ("deadline", "future", "limit_s", "source", "tag", "tensor")

    def __init__(self, tensor: torch.Tensor, source: int | None, tag: int, deadline: Deadline, limit_s: float) -> None:
        self.tensor = tensor
        self.source = source
        self.tag = tag
        self.deadline = deadline
        self.limit_s = limit_s
        self.future: Future[int] = Future()


class Reception:
    def __init__(self, health: Health, mailbox: Mailbox) -> None:
        self._health = health
        self._mailbox = mailbox
        self._others = [rank for rank in range(len(health.cards)) if rank != health.rank]
        self._posted: list[Receipt] = []
        # Re-entrant for a signal handler that closes the group.
        self._guard = threading.RLock()
        self._driving = threading.Lock()
        self._wake = eventfd()
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._driver: threading.Thread | None = None
        self._closed = False

    def post(self, tensor: torch.Tensor, source: int | None, tag: int, operation: str, limit_s: float) -> Receipt:
        """Receive in the background, into a flat tensor. There is no hurry before `await_now`. Of a group that is over
        the receipt says so, as other asynchronous operations do."""
        receipt = Receipt(tensor, source, tag, Deadline(MAX_SECONDS, operation), limit_s)
        try:
            self._add(receipt)
        except GroupError as error:
            receipt.future.set_exception(error)
        else:
            self._call_thread()
        return receipt

    def await_now(self, receipt: Receipt) -> None:
        """Somebody waits for it: its time begins."""
        with self._guard:
            if receipt in self._posted and receipt.deadline.seconds > receipt.limit_s:
                receipt.deadline = Deadline(receipt.limit_s, receipt.deadline.operation)
                os.eventfd_write(self._wake.fileno(), 1)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, operation: str, limit_s: float) -> int:
        """Receive now; who it came from."""
        receipt = self._add(Receipt(tensor, source, tag, Deadline(limit_s, operation), limit_s))
        if self._driving.acquire(blocking=False):
            try:
                self._drive(receipt)
            finally:
                self._driving.release()
                with self._guard:
                    is_wanted = bool(self._posted)
                if is_wanted:
                    self._call_thread()
        return receipt.future.result()

    def _add(self, receipt: Receipt) -> Receipt:
        with self._guard:
            if self._health.failure is not None or self._closed:
                raise self._health.error(receipt.deadline.operation)
            self._posted.append(receipt)
            os.eventfd_write(self._wake.fileno(), 1)
        return receipt

    # -- driving -----------------------------------------------------------------------------------------------------

    def _call_thread(self) -> None:
        with self._guard:
            if self._thread is None and not self._closed:
                name = f"paceline-recv-{self._health.name}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
        self._calls.put(True)

    def _work(self) -> None:
        while self._calls.get():
            with self._driving:
                self._drive(None)

    def drives_here(self) -> bool:
        """Whether the current thread is the one that reads for all."""
        return self._driver is threading.current_thread()

    def _drive(self, until: Receipt | None) -> None:
        """Read messages until one receive is done, or all are; by who holds `_driving`."""
        self._driver = threading.current_thread()
        try:
            self._read_until(until)
        finally:
            self._driver = None

    def _read_until(self, until: Receipt | None) -> None:
        while True:
            with self._guard:
                wanted = list(self._posted)
            if not wanted or (until is not None and until.future.done()):
                return
            first = min(wanted, key=lambda receipt: receipt.deadline.remaining_s())
            try:
                if self._health.failure is not None:
                    raise self._health.error(first.deadline.operation)
                # Tensors of inference mode can be changed only in it, on whichever thread.
                with torch.inference_mode(any(receipt.tensor.is_inference() for receipt in wanted)):
                    if not self._take_asides(wanted):
                        self._read_some(wanted, first)
            except BaseException as error:
                self._fail_all(first, error)
                return

    def _take_asides(self, wanted: list[Receipt]) -> bool:
        for receipt in wanted:
            for rank in self._sources(receipt):
                if self._mailbox.take_aside(receipt.tensor, rank, receipt.tag, receipt.deadline):
                    self._finish(receipt, rank)
                    return True
        return False

    def _read_some(self, wanted: list[Receipt], first: Receipt) -> None:
        """Wait for something to come from somebody wanted, and read it, before the time of the `first` is up."""
        deadline = first.deadline
        named = {receipt.source for receipt in wanted if receipt.source is not None}
        ranks = self._others if any(receipt.source is None for receipt in wanted) else sorted(named)
        # Before the inboxes: what they hold afterwards is all that those who left have sent.
        departed = {rank for rank in ranks if self._health.has_departed(rank)}
        inboxes = {rank: self._mailbox.inbox(rank) for rank in ranks}
        over = {rank for rank in departed if not inboxes[rank].may_bring()}
        if over & named or over == set(ranks):
            missed = over & named or over
            if any(inboxes[rank].is_late() for rank in missed):
                return
            raise self._health.gone(min(missed), "left the group", deadline.operation)
        ready = {rank for rank, inbox in inboxes.items() if inbox.has_more()}
        if ready:
            if deadline.remaining_s() > first.limit_s:
                deadline = Deadline(first.limit_s, deadline.operation)
            for rank in sorted(ready):
                self._read(rank, inboxes[rank], rank in named, deadline)
            return
        waiting = ", ".join(self._health.describe(rank) for rank in ranks if rank not in over)
        polled = [inbox.readable() for rank, inbox in inboxes.items() if rank not in over]
        self._health.wait_any([*polled, (self._wake.fileno(), READ)], deadline, f"a message of {waiting}")
        with contextlib.suppress(BlockingIOError):
            while True:
                os.eventfd_read(self._wake.fileno())

    def _read(self, rank: int, inbox: Inbox, is_named: bool, deadline: Deadline) -> None:
        chosen: Receipt | None = None

        def choose(tag: int) -> torch.Tensor | None:
            nonlocal chosen
            with self._guard:
                fitting = (one for one in self._posted if one.tag == tag and one.source in (None, rank))
                chosen = next(fitting, None)
            return chosen.tensor if chosen is not None else None

        try:
            self._mailbox.read_one(rank, choose, deadline)
        except ConnectionLost as error:
            # Who left in order and is wanted by nobody in particular is not missed.
            if is_named or not self._health.left_in_order(rank, deadline.operation):
                raise self._health.gone(rank, f"was lost ({error})", deadline.operation) from error
            assert inbox.connection is not None
            inbox.connection.close()
        if chosen is not None:
            self._finish(chosen, rank)

    def _sources(self, receipt: Receipt) -> list[int]:
        return self._others if receipt.source is None else [receipt.source]

    def _finish(self, receipt: Receipt, rank: int) -> None:
        with self._guard:
            if receipt not in self._posted:
                return  # the group was closed meanwhile, and its owner told
            self._posted.remove(receipt)
        receipt.future.set_result(rank)

    def _fail_all(self, first: Receipt, error: BaseException) -> None:
        """The group is over; every receive says why, and the one whose time was up says so."""
        operation = first.deadline.operation
        if not isinstance(error, GroupError):
            try:
                end_group(self._health, operation, error)
            except GroupError as reason:
                error = reason
        for receipt in self._take_all():
            is_first = receipt is first and isinstance(error, DeadlineExceeded)
            own = error if is_first else self._health.error(receipt.deadline.operation)
            receipt.future.set_exception(own)

    def _take_all(self) -> list[Receipt]:
        with self._guard:
            posted, self._posted = self._posted, []
        return posted

    def disown(self) -> None:
        """In a forked child."""
        self._guard, self._driving = threading.RLock(), threading.Lock()
        self._thread = self._driver = None
        self._posted = []

    def close(self) -> None:
        """After the health has failed: whoever drives ends by itself."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            thread = self._thread
            if self._wake.number >= 0:  # not in a forked child
                os.eventfd_write(self._wake.fileno(), 1)
        self._calls.put(False)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        for receipt in self._take_all():  # posted when the thread had ended
            receipt.future.set_exception(self._health.error(receipt.deadline.operation))
        self._wake.close()
