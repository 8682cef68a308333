"""One request to the whole group, on its way: to which server which part of it goes next.

An errand is done when every range has taken its push and given what was pulled. Servers may die, and ranges move, in
the middle of it: whatever is not done is asked of whoever is primary then. To ask twice is harmless. Without a
coordinator nobody becomes primary: who is `orphaned` asks the next one that has the range, when one cannot be reached,
and each of them once more, because a connection may break though its server lives. A range may have moved in the last
placement, which this worker never heard of: when nobody that should have it does, all others are asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from paceline.placement.placement import Placement
from paceline.server.messages import CommitStep, Need, Push, RangeRecord, Refusal, ServerAnswer, ServerRequest, Spans

ORPHAN_TRIES = 2  # with each server that has a range, before nobody has it


class Errand:
    def __init__(
        self,
        ranges: Iterable[int],
        *,
        commit: CommitStep | None = None,
        push: Push | None = None,
        pull: Need | None = None,
        exports: bool = False,
        notes: bool = False,
        orphaned: bool = False,
    ) -> None:
        numbers = tuple(ranges)
        self._content = ServerRequest(0, (), commit, push, pull, exports, notes, orphaned=orphaned)
        self._losses: Counter[str] = Counter()  # how often the connection to a server broke, or could not be made
        self._without: set[tuple[str, int]] = set()  # servers, each with a range that it has said it does not have
        self.records: dict[int, RangeRecord] = {}  # of ranges that were exported, or noted
        self.forgone: dict[int, Spans] = {}  # those that have lost updates for good, and which
        self._to_push = set(numbers) if commit is not None or push is not None else set()
        self._to_pull = set(numbers) if pull is not None else set()
        self._under_way: dict[str, ServerRequest] = {}
        self.refusals: dict[int, Refusal] = {}  # the last one of each range that is not done
        self.counted: CommitStep | None = (
            None  # of an earlier attempt at the step that was staged; it is to be made of it
        )

    @property
    def is_done(self) -> bool:
        return not (self._to_push or self._to_pull)

    @property
    def left(self) -> set[int]:
        return self._to_push | self._to_pull

    def settle(self, settled: int) -> None:
        """All leases below this one are known to be done. A pull that waits for some of them says so from now on: a
        range that has lost their updates would have it wait for ever."""
        pull = self._content.pull
        if pull is not None and pull.settled < min(pull.prefix, settled):
            pull = msgspec.structs.replace(pull, settled=settled)
            self._content = msgspec.structs.replace(self._content, pull=pull)

    def requests(self, placement: Placement) -> dict[str, ServerRequest]:
        """What to send now, one request a server at most; it is under way then."""
        found: dict[str, ServerRequest] = {}
        busy = {number for request in self._under_way.values() for number in request.ranges}
        for server, held in self._speakers(placement).items():
            if server in self._under_way:
                continue
            pushes = tuple(number for number in held if number in self._to_push and number not in busy)
            pulls = tuple(number for number in held if number in self._to_pull and number not in busy)
            content = self._content
            if pushes:
                found[server] = msgspec.structs.replace(
                    content, version=placement.version, began=placement.began, ranges=pushes
                )
            elif pulls:
                found[server] = ServerRequest(
                    placement.version,
                    pulls,
                    pull=content.pull,
                    exports=content.exports,
                    notes=content.notes,
                    began=placement.began,
                    orphaned=content.orphaned,
                )
        self._under_way.update(found)
        return found

    def _speakers(self, placement: Placement) -> Mapping[str, Sequence[int]]:
        """Whom to ask for which ranges."""
        if not self.is_orphaned:
            return placement.ranges_of
        found: dict[str, list[int]] = {}
        for number in range(len(placement.ranges)):
            if (server := self._speaker(number, placement)) is not None:
                found.setdefault(server, []).append(number)
        return found

    def _speaker(self, number: int, placement: Placement) -> str | None:
        replicas = placement.ranges[number]
        holders = [replica.server for replica in (replicas.primary, *replicas.backups)]
        others = [server for server in placement.card_of if server not in holders]
        for servers in (holders, others):
            left = [server for server in servers if self._may_have(server, number)]
            if left:
                return min(left, key=lambda server: self._losses[server])
        return None

    def _may_have(self, server: str, number: int) -> bool:
        return self._losses[server] < ORPHAN_TRIES and (server, number) not in self._without

    @property
    def is_orphaned(self) -> bool:
        return self._content.orphaned

    def forlorn(self, placement: Placement) -> set[int]:
        """The ranges that nobody has who could be reached."""
        return {number for number in self.left if self.is_orphaned and self._speaker(number, placement) is None}

    def answered(self, server: str, answer: ServerAnswer) -> tuple[int, ...]:
        """An answer came; the ranges of which it gave what was wanted. What else it tells of a range, another will."""
        request = self._under_way.pop(server)
        given = []
        self.forgone.update(answer.forgone)
        for counted in answer.counted.values():
            self.counted = counted
        for number in request.ranges:
            if number not in answer.pushed:
                self._to_push.discard(number)
            # What was not pushed is pulled again with the push: it must be seen in what is pulled.
            if request.pull is not None and number not in answer.pulled and number not in answer.pushed:
                self._to_pull.discard(number)
                given.append(number)
                if number in answer.records:
                    self.records[number] = answer.records[number]
            refusal = answer.pushed.get(number) or answer.pulled.get(number)
            if refusal is Refusal.MOVED and request.orphaned:
                self._without.add((server, number))
            if refusal is None:
                self.refusals.pop(number, None)
            else:
                self.refusals[number] = refusal
        return tuple(given)

    def lost(self, server: str) -> None:
        """The connection broke: whether anything was done is found out by asking again."""
        self._under_way.pop(server, None)
        self._losses[server] += 1

    @property
    def under_way(self) -> tuple[str, ...]:
        """The servers whose answers are outstanding."""
        return tuple(self._under_way)
