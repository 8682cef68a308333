"""The groups of a member: formed in the background, one for each plan, ended when their generation is over.

A group is closed only when the training thread is not in it (`enter` and `leave` say so); until then it is aborted,
which ends every wait in it. Closing and aborting may take a moment where a peer is stopped, so both happen on a thread
of their own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from paceline.collective import Group
from paceline.collective.choice import ModelShelf, hosts_of
from paceline.collective.forming import Cancellation
from paceline.collective.spare import SpareMemory
from paceline.control.machines.member_events import Event, GroupBroke, GroupFormed, GroupNotFormed
from paceline.control.messages.plan import Plan, PlanStart
from paceline.errors import DeadlineExceeded, PacelineError, PeerLost
from paceline.wire.endpoint import Endpoint

logger = logging.getLogger("paceline.train")

FORMING_S = 30.0
OPERATION_S = 600.0


class Groups:
    """`post` is told of every group that is formed or could not be."""

    def __init__(self, run: str, member: str, endpoint: Endpoint | None, post: Callable[[Event], None]) -> None:
        self.reserve_bytes = 0  # of tensors that a new group is asked for at once
        self._run = run
        self._member = member
        self._endpoint = endpoint
        self._post = post
        self._changed = threading.Condition()
        self._formed: dict[int, Group] = {}
        self._forming: dict[int, Cancellation] = {}
        self._retired: list[tuple[int, Group]] = []
        self._in_use = 0
        self._models = ModelShelf()
        self._threads: list[threading.Thread] = []
        self._closer: threading.Thread | None = None
        self._closed = False
        self._spare = SpareMemory()

    def form(self, plan: Plan) -> None:
        """Form the group of a plan in the background. A member alone needs none."""
        if len(plan.seats) == 1:
            self._post(GroupFormed(plan.generation))
            return
        cancellation = Cancellation()
        with self._changed:
            self._forming[plan.generation] = cancellation
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(
                target=self._form, args=(plan, cancellation), name="paceline-forming", daemon=True
            )
            self._threads.append(thread)
        thread.start()

    def _form(self, plan: Plan, cancellation: Cancellation) -> None:
        assert self._endpoint is not None
        with self._changed:
            after = max(self._formed.items(), default=(0, None))[1]
            model = self._models.get(hosts_of([seat.card for seat in plan.seats]))
        try:
            group = Group.form(
                self._endpoint,
                [seat.card for seat in plan.seats],
                plan.rank_of(self._member),
                name=f"{self._run}.{plan.generation}",
                timeout_s=OPERATION_S,
                forming_s=FORMING_S,
                model=model,
                after=after,
                cancellation=cancellation,
                reserve_bytes=self.reserve_bytes,
                # Nobody waits for a group that is switched to: it is formed beside the work.
                memory=self._spare.take() if plan.start is PlanStart.RECOVER else None,
            )
        except Exception as error:
            if not isinstance(error, PacelineError):
                logger.exception("the group of generation %d could not be formed", plan.generation)
            with self._changed:
                self._forming.pop(plan.generation, None)
            self._post(GroupNotFormed(plan.generation, *blamed(error)))
            return
        with self._changed:
            is_wanted = self._forming.pop(plan.generation, None) is not None and not self._closed
            if is_wanted:
                self._formed[plan.generation] = group
                self._models.put(group.model)
        if is_wanted:
            # Also in the middle of a computation, and however long it takes.
            group.on_death = lambda member: self._post(GroupBroke(plan.generation, (member,), died=True))
            self._post(GroupFormed(plan.generation))
            self._spare.prepare(self.reserve_bytes)
        else:
            group.close()

    def get(self, generation: int) -> Group | None:
        """The group of a generation; None where its member is alone, or when it is over."""
        with self._changed:
            return self._formed.get(generation)

    def enter(self, generation: int) -> None:
        """The training thread works in the group of this generation from now on."""
        with self._changed:
            self._in_use = generation
            self._changed.notify_all()

    def leave(self) -> None:
        self.enter(0)

    def drop(self, below: int) -> None:
        """The generations below are over."""
        with self._changed:
            cancelled = [self._forming.pop(generation) for generation in list(self._forming) if generation < below]
            over = [
                (generation, self._formed.pop(generation)) for generation in list(self._formed) if generation < below
            ]
            self._retired += over
            if over and self._closer is None:
                self._closer = threading.Thread(target=self._bury, name="paceline-groups", daemon=True)
                self._closer.start()
            self._changed.notify_all()
        if cancelled:
            threading.Thread(target=_cancel_all, args=(cancelled,), name="paceline-cancel", daemon=True).start()

    def _bury(self) -> None:
        aborted: set[int] = set()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._work_for(aborted))
                if not self._retired and self._closed:
                    return
                to_abort = [(generation, group) for generation, group in self._retired if generation not in aborted]
                to_close = [one for one in self._retired if one[0] != self._in_use and one[0] in aborted]
                self._retired = [one for one in self._retired if one not in to_close]
            for generation, group in to_abort:
                aborted.add(generation)
                _quietly(group.abort, "its plan is over")
            for _, group in to_close:
                _quietly(group.close)

    def _work_for(self, aborted: set[int]) -> bool:
        return any(generation not in aborted or generation != self._in_use for generation, _ in self._retired)

    def close(self) -> None:
        """End everything; the training thread is in no group any more."""
        self.leave()
        self.drop(1 << 62)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            threads = [*self._threads, *([self._closer] if self._closer else [])]
        for thread in threads:
            thread.join(FORMING_S)
        self._spare.close()


def blamed(error: Exception) -> tuple[tuple[str, ...], bool]:
    """Who is suspected to be the cause of an error, and whether its death is certain."""
    if isinstance(error, PeerLost):
        return (error.member,), error.died
    return (error.members if isinstance(error, DeadlineExceeded) else ()), False


def _quietly(end: Callable[..., None], *arguments: str) -> None:
    """One group that does not end well must not keep the others from ending."""
    try:
        end(*arguments)
    except Exception:
        logger.exception("a group could not be ended")


def _cancel_all(cancellations: list[Cancellation]) -> None:
    for cancellation in cancellations:
        cancellation.cancel("its plan is over")
