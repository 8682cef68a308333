"""What a server does about requests, forwards and placements: which change counts, once, and who must have it.

It knows no socket, clock or thread: the shell brings it what arrives, one at a time, and sends what it leaves in its
links. Tensors are the store's; the keeper says what is to be done with which ranges.

Invariants
- A change is made to a range only by its primary, or by a replica in the order in which its primary made it.
- A step, and a lease, is applied to a range once: what was applied travels with the range's state.
- Staged pushes count only by a commit that finds all ranks of one generation. A push of a later generation fences the
  range: commits that were on their way from earlier ones are refused. What those had staged for the same step is kept
  until it is made: if a commit reached another range before its sender died, the workers are told, and make the step
  of that attempt everywhere.
- An answer is released when every replica that the primary feeds has taken what it speaks of (`PendingAnswer.waits`),
  so nothing is acknowledged, or shown, that the death of this server would take back. A replica that is gone is waited
  for until a placement without it says so.
- What is here is shown to, and changed by, workers of the founding that it belongs to: when a run is founded anew,
  its workers may hear of it before its servers do.
- An update that counts, and that a range which was restored after a loss never got, stays on record with the range:
  it is told again until somebody has heard of it.
- Who is orphaned saves what there is, and ends: for its sake a backup makes a commit that all workers had agreed on,
  and shows what it has. A primary that lives makes the same commit, if anybody is left to go on with it.
- A server that was primary and is not any more answers MOVED, also for what it has done but not acknowledged: the
  request is made again elsewhere, where it counts if it has not yet.

Answers wait behind the states of ranges that are brought up on the same server. So these go one at a time: the next one
is taken when the last one was acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.control.messages.losses import spans_of
from paceline.placement.evolving import Heard
from paceline.placement.placement import Placement
from paceline.server.base import Parcel, RangeStore
from paceline.server.messages import (
    Acknowledged,
    ApplyLease,
    CommitStep,
    Fence,
    Forward,
    Load,
    Push,
    Refusal,
    ServerAnswer,
    ServerRequest,
    StageStep,
)
from paceline.server.tenure import Tenure


class Link:
    """What one replica has yet to acknowledge, and how far it has come. What was sent up to the number `acked` on an
    earlier link to it is waited for no more. `to_bring_up` are the ranges whose state it shall get, with the version
    since which; until then it gets nothing of them."""

    def __init__(self, acked: int) -> None:
        self.queue: deque[tuple[Forward, Parcel]] = deque()
        self.to_bring_up: dict[int, int] = {}
        self.bringing_up = 0  # the number of the last forward with a state
        self.sent = 0  # the number of the last forward
        self.acked = acked


class PendingAnswer(NamedTuple):
    """An answer, to be given by `RangeKeeper.finish` when `RangeKeeper.is_released(waits)`; what of it stands on a
    tenure that is over by then is to be asked for again."""

    request: ServerRequest
    answer: ServerAnswer
    parcel: Parcel
    waits: dict[str, int]
    tenures: dict[int, Tenure]


class RangeKeeper:
    tenure_type = Tenure  # a simulator puts another in its place

    def __init__(self, me: str, store: RangeStore) -> None:
        self.me = me
        self.placement = Placement()
        self.links: dict[str, Link] = {}
        self._store = store
        self._tenures: dict[int, Tenure] = {}
        self._disowned: dict[int, int] = {}  # ranges that another is primary of, since a version that is not here yet
        self._fed: set[tuple[int, str, int]] = set()  # the ranges that replicas get, by server and since when
        self._taken: dict[str, int] = {}  # the number of the last forward of each primary
        self._handing: dict[tuple[int, int], dict[str, int]] = {}  # ranges, since when, and what is waited for
        self._number = 0

    # -- who holds what ----------------------------------------------------------------------------------------------

    def adopt(self, placement: Placement) -> None:
        """Go by a newer placement."""
        if placement.version <= self.placement.version:
            return
        self.placement = placement
        self._disowned = {number: since for number, since in self._disowned.items() if since > placement.version}
        self._take_up()
        self._connect()
        self._hand_over()

    def _take_up(self) -> None:
        for number in [number for number in self._tenures if number >= len(self.placement.ranges)]:
            self._leave(number)
        for number, replicas in enumerate(self.placement.ranges):
            mine = replicas.of(self.me)
            tenure = self._tenures.get(number)
            if tenure is not None and (mine is None or (tenure.since, tenure.origin) != (mine.since, replicas.origin)):
                self._leave(number)
                tenure = None
            if tenure is None and mine is not None:
                self._tenures[number] = self.tenure_type(mine.since, replicas.origin)

    def _leave(self, number: int) -> None:
        del self._tenures[number]
        self._store.forget(number)

    def _connect(self) -> None:
        """Feed all that shall have what this server is primary of; forget those who shall not."""
        fed = {
            (number, replica.server, replica.since)
            for number in self.placement.ranges_of.get(self.me, ())
            for replica in self.placement.ranges[number].everybody()[1:]
        }
        servers = {server for _, server, _ in fed}
        for server in [server for server in self.links if server not in servers]:
            del self.links[server]
        for server in sorted(servers - self.links.keys()):
            self.links[server] = Link(self._number)
        for server, link in self.links.items():
            link.to_bring_up = {
                number: since for number, since in link.to_bring_up.items() if (number, server, since) in fed
            }
        for number, server, since in sorted(fed - self._fed):
            if any(one.server == server for one in self.placement.ranges[number].joining):
                self.links[server].to_bring_up[number] = since
        self._fed = fed
        for server in self.links:
            self._bring_up_next(server)

    def _hand_over(self) -> None:
        """From here on nothing comes to the ranges that are handed over: what is under way now is all."""
        handing = {}
        for number in self.placement.ranges_of.get(self.me, ()):
            replicas = self.placement.ranges[number]
            if replicas.handing:
                key = (number, replicas.handing_since)
                handing[key] = self._handing.get(key) or self._waits_for([number])
        self._handing = handing

    def _bring_up_next(self, server: str) -> None:
        """The state of one more range, if none is under way to this server."""
        link = self.links[server]
        if link.to_bring_up and link.acked >= link.bringing_up:
            number = min(link.to_bring_up)
            since = link.to_bring_up.pop(number)
            record, parcel = self._tenures[number].record(), self._store.snapshot(number)
            self._send(server, (number,), parcel, snapshot=since, record=record)
            link.bringing_up = link.sent

    def _send(self, server: str, ranges: tuple[int, ...], parcel: Parcel, **content: Any) -> None:
        self._number += 1
        link = self.links[server]
        link.queue.append((Forward(self.placement.version, self._number, ranges, **content), parcel))
        link.sent = self._number

    def heard(self) -> Heard:
        """What the coordinator is told."""
        synced = frozenset(
            number
            for number, tenure in self._tenures.items()
            if tenure.is_complete and any(one.server == self.me for one in self.placement.ranges[number].joining)
        )
        handed = frozenset(number for (number, _), waits in self._handing.items() if self.is_released(waits))
        return Heard(self.placement.version, synced, handed)

    def num_ranges(self) -> tuple[int, int]:
        """How many this server is primary of, and how many it backs up."""
        num_primary = len(self.placement.ranges_of.get(self.me, ()))
        return num_primary, len(self._tenures) - num_primary

    # -- requests ----------------------------------------------------------------------------------------------------

    def serve(self, request: ServerRequest, parcel: Parcel) -> PendingAnswer:
        pushed: dict[int, Refusal] = {}
        pulled: dict[int, Refusal] = {}
        mine = []
        for number in request.ranges:
            refusal = self._refusal(number, request)
            if refusal is None:
                mine.append(number)
            else:
                pushed[number] = pulled[number] = refusal
        if request.commit is not None:
            self._commit(mine, request.commit, pushed)
        if request.push is not None:
            left = [number for number in mine if number not in pushed]
            self._push(left, request.push, parcel, pushed)
        answer, records = None, {}
        if request.pull is not None:
            left = [number for number in mine if self._is_seen(number, request, pulled)]
            answer = self._store.pull(left, parcel)
            if request.exports or request.notes:
                records = {number: self._tenures[number].record() for number in left}
        tenures = {number: self._tenures[number] for number in mine}
        forgone = {number: spans_of(tenure.forgone) for number, tenure in tenures.items() if tenure.forgone}
        if request.commit is None and not (request.exports or request.notes):
            forgone = {}
        said = ServerAnswer(
            self.placement.version, pushed, pulled, self._counted(tenures, request), records, forgone=forgone
        )
        return PendingAnswer(request, said, answer, {} if request.orphaned else self._waits_for(mine), tenures)

    def _counted(self, tenures: dict[int, Tenure], request: ServerRequest) -> dict[int, CommitStep]:
        """Where the step that is about to be done was made of an earlier attempt."""
        push = request.push
        if not isinstance(push, StageStep | Fence):
            return {}
        return {
            number: counted
            for number, tenure in tenures.items()
            if (counted := tenure.counted) and counted.step == push.step and counted.generation < push.generation
        }

    def _refusal(self, number: int, request: ServerRequest) -> Refusal | None:
        is_behind = request.version > self.placement.version
        if request.began not in (-1, self.placement.began):
            # The run was founded anew, and one of the two has not heard of it: what is here is another run's state.
            return Refusal.EARLY if is_behind else Refusal.MOVED
        if number >= len(self.placement.ranges):
            return Refusal.EARLY if is_behind else Refusal.MOVED
        if request.orphaned:
            return self._refusal_to_orphan(number)
        replicas = self.placement.ranges[number]
        if replicas.primary.server != self.me or number in self._disowned:
            return Refusal.EARLY if is_behind else Refusal.MOVED
        if replicas.handing:
            return Refusal.EARLY
        if not self._tenures[number].loaded and not isinstance(request.push, Load):
            return Refusal.EMPTY
        return None

    def _refusal_to_orphan(self, number: int) -> Refusal | None:
        tenure = self._tenures.get(number)
        if tenure is None or not tenure.is_complete:
            return Refusal.MOVED
        return None if tenure.loaded else Refusal.EMPTY

    def _commit(self, ranges: Sequence[int], commit: CommitStep, refused: dict[int, Refusal]) -> None:
        due = []
        for number in ranges:
            tenure = self._tenures[number]
            if tenure.step >= commit.step:
                continue
            if max(commit.generation, commit.by) < tenure.generation:
                refused[number] = Refusal.STALE
            elif tenure.is_lossy or len(tenure.staged.get((commit.generation, commit.step), ())) == commit.num_ranks:
                due.append(number)
            else:
                refused[number] = Refusal.EARLY
        if due:
            self._carry_out(due, commit)
            self._forward([number for number in due if self._is_primary(number)], None, commit=commit)

    def _carry_out(self, ranges: Sequence[int], commit: CommitStep) -> None:
        """Where the state was lost, pushes may be missing, which went to who had it before, or was taken to have it
        still: then the update of the step is lost there too."""
        key = (commit.generation, commit.step)
        whole = [number for number in ranges if len(self._tenures[number].staged.get(key, ())) == commit.num_ranks]
        if whole:
            self._store.commit(whole, commit)
        for number in ranges:
            tenure = self._tenures[number]
            if number in whole:
                del tenure.staged[key]
            else:
                tenure.forgone.add(commit.step)
            for generation, step in [other for other in tenure.staged if other[1] <= commit.step]:
                del tenure.staged[(generation, step)]
                self._store.unstage(number, generation, step)
            tenure.step, tenure.counted = commit.step, commit

    def _push(self, ranges: Sequence[int], push: Push, parcel: Parcel, refused: dict[int, Refusal]) -> None:
        fresh = []
        for number in ranges:
            verdict = self._tenures[number].judge(push)
            if isinstance(verdict, Refusal):
                refused[number] = verdict
            elif verdict:
                fresh.append(number)
        if fresh:
            self._make(fresh, push, parcel)
            self._forward(fresh, parcel, push=push)

    def _make(self, ranges: Sequence[int], push: Push, parcel: Parcel) -> None:
        match push:
            case StageStep():
                for number in ranges:
                    self._throw_away(number, push)
                self._store.stage(ranges, push, parcel)
            case ApplyLease(is_void=False):
                self._store.apply(ranges, push, parcel)
            case Load():
                self._store.load(ranges, parcel)
        for number in ranges:
            self._tenures[number].take(push)

    def _throw_away(self, number: int, push: StageStep) -> None:
        """What was staged in earlier generations for the step that is done again, and for later ones."""
        staged = self._tenures[number].staged
        for generation, step in [key for key in staged if key[0] < push.generation and key[1] >= push.step]:
            del staged[(generation, step)]
            self._store.unstage(number, generation, step)

    def _is_seen(self, number: int, request: ServerRequest, pulled: dict[int, Refusal]) -> bool:
        need, tenure = request.pull, self._tenures[number]
        assert need is not None
        is_behind = need.epoch > tenure.leases.epoch or not tenure.leases.reaches(need.epoch, need.settled)
        if tenure.is_lossy and is_behind:
            tenure.forgo(need.epoch, need.settled)
        if not tenure.loaded:
            pulled[number] = Refusal.EMPTY
        elif tenure.step < need.step or not tenure.leases.reaches(need.epoch, need.prefix):
            pulled[number] = Refusal.EARLY
        return number not in pulled

    # -- replicas ----------------------------------------------------------------------------------------------------

    def _forward(
        self,
        ranges: Sequence[int],
        parcel: Parcel,
        *,
        push: Push | None = None,
        commit: CommitStep | None = None,
    ) -> None:
        fed: dict[str, list[int]] = {}
        for number in ranges:
            for replica in self.placement.ranges[number].everybody()[1:]:
                if number not in self.links[replica.server].to_bring_up:
                    fed.setdefault(replica.server, []).append(number)
        for server, numbers in fed.items():
            self._send(server, tuple(numbers), parcel, commit=commit, push=push)

    def take(self, sender: str, forward: Forward, parcel: Parcel) -> Acknowledged:
        """A change from a primary, or the state of a range. The shell holds it back while `forward.version` is newer
        than the placement here. What comes again, after a connection broke, is known by its number."""
        # Also of what comes again: the first acknowledgement, with what it refused, may never have arrived.
        refused = tuple(number for number in forward.ranges if not self._is_led_by(sender, number))
        if forward.number > self._taken.get(sender, 0):
            self._taken[sender] = forward.number
            self._follow([number for number in forward.ranges if number not in refused], forward, parcel)
        return Acknowledged(forward.number, refused, self.placement.version)

    def _is_led_by(self, server: str, number: int) -> bool:
        return number < len(self.placement.ranges) and self.placement.ranges[number].primary.server == server

    def _follow(self, ranges: Sequence[int], forward: Forward, parcel: Parcel) -> None:
        """Do what the primary did, where this server is still the replica that it was meant for."""
        mine = [
            number
            for number in ranges
            if (tenure := self._tenures.get(number)) is not None and tenure.since <= forward.version
        ]
        if forward.snapshot:
            self._become(mine, forward, parcel)
            return
        mine = [number for number in mine if self._tenures[number].is_complete]
        if forward.commit is not None and mine:
            self._carry_out(mine, forward.commit)
        if forward.push is not None and mine:
            self._make(mine, forward.push, parcel)

    def _become(self, ranges: Sequence[int], forward: Forward, parcel: Parcel) -> None:
        for number in ranges:
            tenure = self._tenures[number]
            if tenure.since == forward.snapshot and not tenure.is_complete:
                assert forward.record is not None
                self._store.restore(number, parcel)
                tenure.become(forward.record)

    def acknowledged(self, server: str, message: Acknowledged) -> None:
        if message.version > self.placement.version:
            self._disowned.update(dict.fromkeys(message.refused, message.version))
        if (link := self.links.get(server)) is not None:
            link.acked = max(link.acked, message.number)
            while link.queue and link.queue[0][0].number <= link.acked:
                link.queue.popleft()
            self._bring_up_next(server)

    def _waits_for(self, ranges: Sequence[int]) -> dict[str, int]:
        """How far the replicas of these ranges must have come. Who has nothing of a range yet gets its state as it will
        be then."""
        links = {
            replica.server: link
            for number in ranges
            for replica in self.placement.ranges[number].everybody()[1:]
            if (link := self.links.get(replica.server)) is not None and number not in link.to_bring_up
        }
        return {server: link.sent for server, link in links.items() if link.sent}

    def is_released(self, waits: dict[str, int]) -> bool:
        return all((link := self.links.get(server)) is None or link.acked >= number for server, number in waits.items())

    def finish(self, outcome: PendingAnswer) -> ServerAnswer:
        """The answer, as of now: for what has moved meanwhile it is another."""
        answer = outcome.answer
        moved = {
            number: Refusal.MOVED
            for number, tenure in outcome.tenures.items()
            if not (outcome.request.orphaned or self._is_primary(number)) or self._tenures.get(number) is not tenure
        }
        counted = {number: commit for number, commit in answer.counted.items() if number not in moved}
        return ServerAnswer(
            self.placement.version,
            {**answer.pushed, **moved},
            {**answer.pulled, **moved},
            counted,
            answer.records,
            forgone={number: spans for number, spans in answer.forgone.items() if number not in moved},
            detail=answer.detail,
        )

    def _is_primary(self, number: int) -> bool:
        return number not in self._disowned and self._is_led_by(self.me, number)
