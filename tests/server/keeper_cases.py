"""Keepers that talk to each other by hand, over a placement that the test writes."""

from __future__ import annotations

from typing import Any

from paceline.placement.placement import Placement, Replica, Replicas
from paceline.server.keeper import PendingAnswer, RangeKeeper
from paceline.server.messages import Acknowledged, CommitStep, Load, Need, Push, ServerAnswer, ServerRequest
from paceline.testing.joint.servers import Entry, ListStore


def replicas(primary: str, *backups: str, since: int = 1, **content: Any) -> Replicas:
    """All of them since the same version; `joining` are (server, since)."""
    joining = tuple(Replica(*one) for one in content.pop("joining", ()))
    others = tuple(Replica(backup, since) for backup in backups)
    return Replicas(Replica(primary, since), others, joining, origin=content.pop("origin", 1), **content)


class Group:
    """Servers by name, all of them told of each placement unless a test tells them one by one."""

    def __init__(self, names: str, *ranges: Replicas) -> None:
        self.keepers = {name: RangeKeeper(name, ListStore()) for name in names}
        self.stores: dict[str, ListStore] = {name: keeper._store for name, keeper in self.keepers.items()}  # type: ignore[misc]
        self.version = 0
        self.tell(*ranges)

    def tell(self, *ranges: Replicas, who: str = "") -> Placement:
        self.version += 1
        placement = Placement(self.version, 1, 1, (), ranges)
        for name in who or self.keepers:
            self.keepers[name].adopt(placement)
        return placement

    def ask(
        self,
        name: str,
        *ranges: int,
        commit: CommitStep | None = None,
        push: Push | None = None,
        pull: Need | None = None,
        parcel: Any = None,
        notes: bool = False,
        orphaned: bool = False,
    ) -> PendingAnswer:
        version = self.keepers[name].placement.version
        request = ServerRequest(version, ranges or (0,), commit, push, pull, notes=notes, orphaned=orphaned)
        return self.keepers[name].serve(request, parcel)

    def load(
        self,
        name: str,
        *ranges: int,
        restored: bool = False,
        step: int = 0,
        epoch: int = 0,
        prefix: int = 0,
        num_leases: int = 0,
    ) -> None:
        """Loads ranges and lets all backups have it."""
        origin = self.keepers[name].placement.ranges[(ranges or (0,))[0]].origin
        load = Load(origin, restored, step, epoch, prefix, num_leases=num_leases)
        outcome = self.ask(name, *ranges, push=load, parcel=[("since", origin, 0)])
        self.deliver(name)
        assert not self.answer(name, outcome).pushed

    def deliver(self, sender: str, receiver: str = "", *, most: int = 1 << 30) -> list[Acknowledged]:
        """All that waits in the links of a server arrives, and is acknowledged."""
        found = []
        for name, link in list(self.keepers[sender].links.items()):
            for forward, parcel in list(link.queue)[:most] if receiver in ("", name) else ():
                message = self.keepers[name].take(sender, forward, parcel)
                self.keepers[sender].acknowledged(name, message)
                found.append(message)
        return found

    def is_free(self, name: str, outcome: PendingAnswer) -> bool:
        return self.keepers[name].is_released(outcome.waits)

    def answer(self, name: str, outcome: PendingAnswer) -> ServerAnswer:
        assert self.is_free(name, outcome)
        return self.keepers[name].finish(outcome)

    def log(self, name: str, number: int = 0) -> list[Entry]:
        return self.stores[name].logs[number][1:]
