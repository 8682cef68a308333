"""Which leases of an epoch are done: a prefix, and what is done beyond it.

Leases are numbered from 0 in each epoch, and every one of them gets done, so the set stays small however long the
epoch is.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class LeaseSet(msgspec.Struct):
    """All leases of earlier epochs are done; of `epoch` those below `prefix` and those in `beyond`."""

    epoch: int = 0
    prefix: int = 0
    beyond: set[int] = set()

    def has(self, epoch: int, lease: int) -> bool:
        if epoch != self.epoch:
            return epoch < self.epoch
        return lease < self.prefix or lease in self.beyond

    def add(self, epoch: int, lease: int) -> None:
        if epoch > self.epoch:
            self.epoch, self.prefix, self.beyond = epoch, 0, set()
        if self.has(epoch, lease):
            return
        self.beyond.add(lease)
        while self.prefix in self.beyond:
            self.beyond.remove(self.prefix)
            self.prefix += 1

    def reaches(self, epoch: int, prefix: int) -> bool:
        """Whether all leases of the epoch below `prefix` are done."""
        if epoch != self.epoch:
            return epoch < self.epoch or prefix <= 0
        return self.prefix >= prefix

    def update(self, other: LeaseSet) -> None:
        """What is done in either is done."""
        if other.epoch > self.epoch:
            self.epoch, self.prefix, self.beyond = other.epoch, other.prefix, set(other.beyond)
        elif other.epoch == self.epoch:
            self.add_all(range(self.prefix, other.prefix))
            self.add_all(other.beyond)

    def add_all(self, leases: Iterable[int]) -> None:
        for lease in leases:
            self.add(self.epoch, lease)

    def meet(self, other: LeaseSet) -> LeaseSet:
        """What is done in both."""
        if self.epoch != other.epoch:
            return min(self, other, key=lambda one: one.epoch).copy()
        prefix = min(self.prefix, other.prefix)
        further = max(self.prefix, other.prefix)
        either = self.beyond | other.beyond | set(range(prefix, further))
        both = {lease for lease in either if self.has(self.epoch, lease) and other.has(self.epoch, lease)}
        found = LeaseSet(self.epoch, prefix)
        found.add_all(both)
        return found

    def joined(self, other: LeaseSet) -> LeaseSet:
        """What is done in either."""
        found = self.copy()
        found.update(other)
        return found

    def copy(self) -> LeaseSet:
        return LeaseSet(self.epoch, self.prefix, set(self.beyond))

    def __len__(self) -> int:
        """Of the present epoch."""
        return self.prefix + len(self.beyond)


def lease_set(epoch: int, prefix: int, beyond: Iterable[int]) -> LeaseSet:
    """As it is kept in checkpoints."""
    return LeaseSet(epoch, prefix, set(beyond))
