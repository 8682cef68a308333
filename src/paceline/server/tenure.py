"""A server's part in one range: what has been applied to it, and what is new to it. Pure."""

from __future__ import annotations

from typing import assert_never

from paceline.control.leases.lease_set import LeaseSet
from paceline.control.messages.losses import numbers_of, spans_of
from paceline.server.messages import ApplyLease, CommitStep, Fence, Load, Push, RangeRecord, Refusal, StageStep


class Tenure:
    """This server's part in one range, since one version."""

    def __init__(self, since: int, origin: int) -> None:
        self.since = since
        self.is_complete = since == origin  # else it is being brought up
        self.origin = origin
        self.loaded = False
        self.is_lossy = False  # it was restored after a loss
        self.step = 0
        self.leases = LeaseSet()
        self.generation = 0
        self.staged: dict[tuple[int, int], set[int]] = {}  # the ranks that have pushed for (generation, step)
        self.counted: CommitStep | None = None  # the last one
        self.num_leases = 0  # of an epoch
        self.forgone: set[int] = set()  # updates that count and will never be applied here

    def record(self) -> RangeRecord:
        staged = tuple((*key, rank) for key, ranks in self.staged.items() for rank in ranks)
        return RangeRecord(
            self.loaded,
            self.is_lossy,
            self.step,
            self.leases.epoch,
            self.leases.prefix,
            tuple(sorted(self.leases.beyond)),
            self.generation,
            staged,
            self.counted,
            self.num_leases,
            spans_of(self.forgone) if self.forgone else (),
        )

    def become(self, record: RangeRecord) -> None:
        self.is_complete = True
        self.loaded, self.is_lossy = record.loaded, record.lossy
        self.step = record.step
        self.leases = LeaseSet(record.epoch, record.prefix, set(record.beyond))
        self.generation = record.generation
        self.counted = record.counted
        self.num_leases, self.forgone = record.num_leases, numbers_of(record.forgone)
        self.staged = {}
        for generation, step, rank in record.staged:
            self.staged.setdefault((generation, step), set()).add(rank)

    def forgo(self, epoch: int, prefix: int) -> None:
        """All leases before this one are done. Those that this range lost will not come any more."""
        per_epoch, had = self.num_leases, self.leases
        every = range(had.epoch * per_epoch + had.prefix, epoch * per_epoch + prefix) if per_epoch else ()
        self.forgone |= {number + 1 for number in every if not had.has(*divmod(number, per_epoch))}
        self.leases.update(LeaseSet(epoch, prefix))

    def judge(self, push: Push) -> bool | Refusal:
        """Whether a push is new here."""
        match push:
            case Load():
                return not self.loaded and push.origin == self.origin
            case ApplyLease():
                return not self.leases.has(push.epoch, push.lease)
            case Fence():
                return push.generation > self.generation
            case StageStep():
                if self.step >= push.step:
                    return False
                if push.generation < self.generation:
                    return Refusal.STALE
                return push.rank not in self.staged.get((push.generation, push.step), ())
            case _:
                assert_never(push)

    def take(self, push: Push) -> None:
        """A push was made: note that it was."""
        match push:
            case Load():
                self.loaded, self.is_lossy = True, push.restored
                self.step = push.step
                self.leases = LeaseSet(push.epoch, push.prefix, set(push.beyond))
                self.num_leases = push.num_leases
            case ApplyLease():
                if self.is_lossy and push.epoch > self.leases.epoch:
                    self.forgo(push.epoch, 0)
                self.leases.add(push.epoch, push.lease)
            case Fence():
                self.generation = push.generation
            case StageStep():
                self.generation = push.generation
                self.staged.setdefault((push.generation, push.step), set()).add(push.rank)
            case _:
                assert_never(push)
