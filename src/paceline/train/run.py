"""This process in its run: it joins, does operations with the others, and ends in order.

    join()             become a member, at the first call that needs it
    seat()             wait until this worker has the state of the run
    operate(...)       do one operation, as often as it takes, until it counts
    close()            the end of the training: returns when all workers have come to it

Whoever is told to go, or is left alone, ends inside these calls: the script has no part in it (`going`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from paceline.control.exit_codes import HALTED, START_AGAIN
from paceline.control.machines.member_events import Fail, Leave, MemberReady, OperationKind
from paceline.control.messages import losses
from paceline.control.messages.plan import Phase, Plan
from paceline.control.shell.ticket import Ticket
from paceline.custody.moving import Unreached
from paceline.errors import Evicted, Orphaned
from paceline.strategy.base import Notice
from paceline.strategy.header import HeaderRows, Row, exchange
from paceline.train import joining
from paceline.train.endings import Endings
from paceline.train.halting import Halting
from paceline.train.ledger import END
from paceline.train.loops.base import Loop
from paceline.train.membership import Released
from paceline.train.operation import Place, TrainingOperation
from paceline.train.parts import TrainingParts
from paceline.train.run_log import RUN_LOG
from paceline.train.strategies import served_by
from paceline.watch import spans
from paceline.wire.identity import Identity

logger = logging.getLogger("paceline.train")


class Run:
    """`ticket` is that of the run which started this process; None for a run of one. Also what a strategy may ask of
    its training (`StrategyHost`)."""

    def __init__(self, ticket: Ticket | None) -> None:
        self.ticket = ticket
        self.identity = Identity()
        self.halting = Halting(ticket)
        self.endings = Endings(self)
        self.is_closed = False
        self._joined: joining.Joined | None = None
        self._untold: list[tuple[str, str]] = []  # lines of the log from before that

    def equip(self, parts: TrainingParts, loop: Loop) -> None:
        """What this worker trains with: before the first call of anything else but `tell`."""
        self._parts = parts
        self._loop = loop
        self._served = served_by(parts.updater.strategy)
        parts.saver.is_orphaned, parts.saver.is_quiet = self.halting.is_due, self.halting.is_quiet

    @property
    def is_alone(self) -> bool:
        return self.ticket is None

    @property
    def operation(self) -> int:
        """The number of the last operation that was tried."""
        return self._joined.membership.operation if self._joined is not None else 0

    # -- the log -----------------------------------------------------------------------------------------------------

    def tell(self, kind: str, text: str) -> None:
        """For the run's log."""
        logger.info("%s: %s", kind, text)
        if kind not in RUN_LOG:
            return
        if self._joined is None:
            self._untold.append(RUN_LOG[kind](text))
        else:
            self._joined.client.progress.log(*RUN_LOG[kind](text))

    def tell_death(self, text: str) -> None:
        """A loader worker died."""
        self.tell("loader", text)

    # -- what a strategy asks ----------------------------------------------------------------------------------------

    def check(self) -> None:
        self.halting.check()
        if self._joined is not None:
            self._joined.membership.check()

    def check_wait(self) -> None:
        self.halting.check()
        self.halting.check_wait(self._served.waited_s if self._served is not None else 0.0)
        if self._joined is not None:
            self._joined.membership.check_wait()

    def is_loader(self) -> bool:
        plan = self._last_plan()
        return plan is not None and self._joined is not None and plan.rank_of(self._joined.member) == 0

    def recall(self, with_optimizers: bool) -> int:
        return self._parts.ledger.recall(with_optimizers)

    # -- the beginning -----------------------------------------------------------------------------------------------

    @property
    def joined(self) -> joining.Joined:
        """What there is once this worker belongs to the run."""
        assert self._joined is not None
        return self._joined

    def join(self) -> joining.Joined:
        """Become a member of the run: at the first call that needs it."""
        if self._joined is None:
            import torch._dynamo  # noqa: F401  # the first optimizer step would, for seconds, while others wait

            parts = self._parts
            try:
                base = parts.ledger.look_for_start()
            except Unreached as error:
                self._halt(Orphaned(f"this worker cannot learn which checkpoints there are: {error}"))
            joined = joining.join(self.ticket, self.identity, max(base, 0), parts.ledger, self.halting.begin)
            self._joined = joined
            while self._untold:
                joined.client.progress.log(*self._untold.pop(0))
            self.halting.connect(joined)
            parts.ledger.connect(
                joined.run, joined.client.progress, lambda: joined.client.look(lambda machine: machine.applied)
            )
            joined.groups.reserve_bytes = sum(one.nbytes for one in parts.model.parameters() if one.requires_grad)
            self.endings.watch(is_alone=self.is_alone, has_checkpoints=parts.saver.is_on)
            ranges: tuple[int, ...] = ()
            if self._served is not None and joined.endpoint is not None:
                joined.membership.on_placement = self._served.connect(joined.endpoint).adopt
                ranges = self._served.layout.weights
            self._loop.connect(joined)
            capacity = self.ticket.capacity if self.ticket is not None else 0.0
            introduction = joining.introduce(
                joined, parts.facts, parts.model, capacity, ranges, leased=self._loop.is_leased
            )
            if self.ticket is not None:
                joined.membership.expect_state(parts.ledger.training.expected_bytes())
            joined.client.post(MemberReady(introduction, base))
        return self._joined

    def seat(self) -> None:
        """Wait until this worker has the state of the run."""
        joined = self.join()
        if joined.client.look(lambda machine: machine.phase) is Phase.READY or not self._parts.ledger.has_worked:
            try:
                joined.membership.wait_for_state()
            except Released as released:
                self._go(released)
            except Orphaned as orphaned:
                # On the coordinator's own host an agent brings it back, and this worker with it.
                if self.halting.is_guest:
                    self._halt(orphaned)
                self._give_way(orphaned)
            except Evicted as evicted:
                self._give_way(evicted)

    def present_plan(self) -> Plan:
        """While the next one is being made, the last one."""
        self.seat()
        return self._last_plan() or self.joined.membership.wait_for_plan()

    def _last_plan(self) -> Plan | None:
        if self._joined is None:
            return None
        return self._joined.client.look(lambda machine: machine.plan) or self._joined.membership.last_plan

    # -- operations --------------------------------------------------------------------------------------------------

    def notice(self, place: Place) -> Notice:
        return self.joined.membership.notice(place)

    def exchange(self, place: Place, weight: float = 0.0) -> HeaderRows:
        """Everybody's header, of an operation that has nothing else to exchange but a number."""
        notice = self.notice(place)
        return place.checked(exchange(place.group, Row(notice.operation, notice.held, notice.flags, weight=weight)))

    def check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this session is closed; a training that goes on needs a new one")

    def operate(self, operation: TrainingOperation) -> Any:
        """Do an operation until it counts; its outcome."""
        self.check_open()
        self.seat()
        kind = operation.kind
        if self._loop.is_open and kind is not OperationKind.END:
            raise RuntimeError(
                f"{kind.value} in the middle of an epoch, where each worker is somewhere else; with "
                "consistency='async' or 'bounded:K' call it between epochs, when all leases are done"
            )
        watch = self._parts.sharing.watch
        if kind is not OperationKind.STEP:
            watch.pause()
        with self.going(), self.endings.watching_for_exit():
            outcome = self.joined.membership.operate(operation, End(self))
        if outcome == END:
            self._leave_after_end()
            raise SystemExit(HALTED if self.halting.has_halted else self.endings.exit_code)
        watch.resume()
        return outcome

    @contextlib.contextmanager
    def going(self) -> Iterator[None]:
        """Who is told to go, or is left alone, ends here."""
        try:
            yield
        except Released as released:
            self._go(released)
        except Evicted as evicted:
            self._give_way(evicted)
        except Orphaned as orphaned:
            self._halt(orphaned)

    def _go(self, released: Released) -> NoReturn:
        """The run goes on, or ended, without this worker, in order."""
        logger.info("this worker leaves: %s", released.reason)
        self._finish(10.0)
        raise SystemExit(0) from None

    def _give_way(self, reason: Evicted | Orphaned) -> NoReturn:
        """The run goes on, or is over, without this worker, which may come back as another."""
        logger.warning("this worker ends: %s", reason)
        self._finish(1.0)
        raise SystemExit(START_AGAIN) from None

    def _halt(self, orphaned: Orphaned) -> NoReturn:
        self._leave_behind(orphaned)
        raise SystemExit(HALTED) from None

    def _leave_behind(self, orphaned: Orphaned) -> None:
        """The coordinator is gone for good: this worker ends, and what it holds stays on its host."""
        parts, served = self._parts, self._served
        making = served.be_orphaned() if served is not None else 0
        if self._loop.is_leased:
            served = None  # each range says which leases it has

        def leave_behind() -> Path | None:
            complete = functools.partial(self._loop.complete, making) if making else None
            return parts.ledger.leave_behind(
                self._loop.num_leases_done(), lambda: served.gathered_step if served is not None else 0, complete
            )

        self.halting.halt(orphaned, leave_behind)
        self._finish(0.1)

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self) -> NoReturn:
        """The run was asked to stop: all workers end it here instead of going on."""
        self.operate(End(self))
        raise AssertionError("the end has no other outcome")

    def save_at_end(self, place: Place) -> None:
        self._loop.save_at_end(place)

    def publish_at_end(self, place: Place) -> None:
        self._parts.ledger.publish_at_end(place)

    def close(self) -> None:
        """The end of the training: returns when all workers have come to it."""
        if self.is_closed:
            return
        if self._joined is not None and not self.endings.has_failed:
            self._parts.ledger.book.is_stopped = False  # to resume a run that came to its end is to go on
            try:
                if self._joined.membership.operate(End(self), End(self)) == END:
                    self._leave_after_end()
            except Released as released:
                logger.info("this worker leaves: %s", released.reason)
            except Orphaned as orphaned:
                self._leave_behind(orphaned)
        if not self.is_closed:
            self._finish(10.0)

    def _leave_after_end(self) -> None:
        saver = self._parts.saver
        saver.close()
        if unsaved := saver.unsaved():
            logger.error("%s", unsaved)
            self.tell(losses.NOT_SAVED, unsaved)
        try:
            self.joined.membership.wait_for_release()
        except Orphaned as orphaned:
            self._leave_behind(orphaned)
        else:
            self._finish(10.0)

    def fail(self, cause: str) -> None:
        """The script raised: say why, and go."""
        if self._joined is not None and not self.is_closed:
            self._joined.client.post(Fail(cause))
            self._finish(5.0)

    def leave(self) -> None:
        """Ask to leave after the step under way; alone, to stop."""
        if self._joined is not None:
            self._joined.client.post(Leave())
            self.halting.hurry()

    def give_up_saving(self) -> bool:
        """End without the last checkpoint, if that is all that the end waits for; whether it is."""
        return self._parts.saver.give_up()

    def _finish(self, flush_s: float) -> None:
        self.is_closed = True
        self.halting.close()
        self._parts.close()
        spans.finish()
        self.endings.close()  # a signal that comes while loader workers end is still one of those that are waited for
        if self._joined is not None:
            self._joined.close(flush_s)


class End:
    """The last operation. Each worker comes to it when its script ends, or where the run was asked to stop."""

    kind = OperationKind.END

    def __init__(self, run: Run) -> None:
        self._run = run

    def attempt(self, place: Place) -> HeaderRows:
        self._run.save_at_end(place)
        rows = self._run.exchange(place)
        self._run.publish_at_end(place)
        return rows

    def prepare(self, plan: Plan) -> None:
        """Nothing takes time."""

    def commit(self, place: Place) -> Any:
        return END
