"""Faults of servers, of what workers ask of them, and of what the coordinator decides about ranges and leases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.leases.lease_set import LeaseSet
from paceline.control.machines.member_events import Exit
from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.server_manager import Aim, ServerManager
from paceline.control.machines.server_member import ServerMember
from paceline.control.messages.members import Verdict
from paceline.placement.evolving import Heard
from paceline.placement.gauge import LoadWindow
from paceline.placement.placement import Placement, Replicas
from paceline.placement.placing import Homes
from paceline.server.errand import Errand
from paceline.server.keeper import PendingAnswer, RangeKeeper
from paceline.server.messages import (
    Acknowledged,
    ApplyLease,
    CommitStep,
    Forward,
    Load,
    Push,
    Refusal,
    ServerAnswer,
    ServerRequest,
    StageStep,
)
from paceline.server.tenure import Tenure
from tests.control.mutations.mutating import mutated

# -- what is acknowledged, and shown -----------------------------------------------------------------------------------


class _WaitsForNobody(RangeKeeper):
    def is_released(self, waits: dict[str, int]) -> bool:
        return True


class _ShowsWhatOnlyItHas(RangeKeeper):
    def serve(self, request: ServerRequest, parcel: Any) -> PendingAnswer:
        outcome = super().serve(request, parcel)
        return outcome._replace(waits={}) if request.push is None and request.commit is None else outcome


class _AnswersForWhatMoved(RangeKeeper):
    def finish(self, outcome: PendingAnswer) -> ServerAnswer:
        return outcome.answer


class _HearsNoRefusal(RangeKeeper):
    def acknowledged(self, server: str, message: Acknowledged) -> None:
        super().acknowledged(server, Acknowledged(message.number))


class _RefusesOnce(RangeKeeper):
    def take(self, sender: str, forward: Forward, parcel: Any) -> Acknowledged:
        is_known = forward.number <= self._taken.get(sender, 0)
        message = super().take(sender, forward, parcel)
        return Acknowledged(forward.number) if is_known else message


# -- what counts, once -------------------------------------------------------------------------------------------------


class _AnyLeaseIsNew(Tenure):
    def judge(self, push: Push) -> bool | Refusal:
        return True if isinstance(push, ApplyLease) else super().judge(push)


class _CountsEveryPush(RangeKeeper):
    tenure_type = _AnyLeaseIsNew


class _KeepsNoRecord(RangeKeeper):
    """As a backup: what was applied is in the state, but not in the set."""

    def _follow(self, ranges: Sequence[int], forward: Forward, parcel: Any) -> None:
        super()._follow(ranges, forward, parcel)
        if isinstance(forward.push, ApplyLease):
            for number in ranges:
                if number in self._tenures:
                    self._tenures[number].leases = LeaseSet()


class _SendsNoRecord(RangeKeeper):
    def _send(self, server: str, ranges: tuple[int, ...], parcel: Any, **content: Any) -> None:
        if content.get("record") is not None:
            content["record"] = msgspec.structs.replace(content["record"], epoch=0, prefix=0, beyond=(), step=0)
        super()._send(server, ranges, parcel, **content)


class _TakesForwardsAgain(RangeKeeper):
    def take(self, sender: str, forward: Forward, parcel: Any) -> Acknowledged:
        self._taken.clear()
        return super().take(sender, forward, parcel)


class _AnyLoadIsNew(Tenure):
    def judge(self, push: Push) -> bool | Refusal:
        return True if isinstance(push, Load) else super().judge(push)


class _LoadsAgain(RangeKeeper):
    tenure_type = _AnyLoadIsNew


class _TakesLostForDone(Errand):
    def lost(self, server: str) -> None:
        if server in self._under_way:
            self.answered(server, ServerAnswer(0))


class _SaysOnceWhatIsDone(Errand):
    """When it sets out, and not when it asks again."""

    def settle(self, settled: int) -> None:
        pass


# -- steps -------------------------------------------------------------------------------------------------------------


class _MixesGenerations(RangeKeeper):
    def serve(self, request: ServerRequest, parcel: Any) -> PendingAnswer:
        if isinstance(request.push, StageStep):
            request = msgspec.structs.replace(request, push=msgspec.structs.replace(request.push, generation=1))
        if request.commit is not None:
            request = msgspec.structs.replace(request, commit=msgspec.structs.replace(request.commit, generation=1))
        return super().serve(request, parcel)


class _CommitsWhatIsThere(RangeKeeper):
    def _commit(self, ranges: Sequence[int], commit: CommitStep, refused: dict[int, Refusal]) -> None:
        for number in ranges:
            staged = self._tenures[number].staged.get((commit.generation, commit.step), ())
            if staged:
                commit = msgspec.structs.replace(commit, num_ranks=min(commit.num_ranks, len(staged)))
        super()._commit(ranges, commit, refused)


class _HearsOldCommits(RangeKeeper):
    def _commit(self, ranges: Sequence[int], commit: CommitStep, refused: dict[int, Refusal]) -> None:
        super()._commit(ranges, msgspec.structs.replace(commit, by=1 << 30), refused)


class _SaysNotWhatCounted(RangeKeeper):
    def _counted(self, tenures: dict[int, Tenure], request: ServerRequest) -> dict[int, CommitStep]:
        return {}


class _IgnoresTheBound(RangeKeeper):
    def _is_seen(self, number: int, request: ServerRequest, pulled: dict[int, Refusal]) -> bool:
        assert request.pull is not None
        need = msgspec.structs.replace(request.pull, prefix=0)
        return super()._is_seen(number, msgspec.structs.replace(request, pull=need), pulled)


# -- who is primary ----------------------------------------------------------------------------------------------------


class _FollowsAnybody(RangeKeeper):
    def _is_led_by(self, server: str, number: int) -> bool:
        return server != self.me or super()._is_led_by(server, number)


class _ServesWhileItHandsOver(RangeKeeper):
    def _refusal(self, number: int, request: ServerRequest) -> Refusal | None:
        refusal = super()._refusal(number, request)
        tenure = self._tenures.get(number)
        is_handing = self._is_primary(number) and bool(self.placement.ranges[number].handing)
        return None if is_handing and tenure is not None and tenure.loaded else refusal


class _HandsOverAtOnce(RangeKeeper):
    def heard(self) -> Heard:
        return super().heard()._replace(handed=frozenset(number for number, _ in self._handing))


class _KeepsWhatItHad(RangeKeeper):
    """When it is to be brought up anew."""

    def _take_up(self) -> None:
        for number, replicas in enumerate(self.placement.ranges):
            mine, tenure = replicas.of(self.me), self._tenures.get(number)
            if mine is not None and tenure is not None:
                tenure.since = mine.since
        super()._take_up()


class _CountsWhoIsJoining(ServerManager):
    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        everything = frozenset(range(len(goal)))
        hopeful = {name: Heard(version, everything, one.handed) for name, one in heard.items()}
        return super()._evolve(hopeful, goal, version)


class _PromotesWhoIsJoining(ServerManager):
    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        found = list(super()._evolve(heard, goal, version))
        for number, before in enumerate(self.placement.ranges):
            joining = [one for one in before.joining if one.server in heard]
            if before.primary.server not in heard and joining:
                found[number] = Replicas(joining[0], (), (), before.origin)
        return tuple(found)


class _KeepsBackupsOfTheDead(ServerManager):
    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        found = list(super()._evolve(heard, goal, version))
        for number, before in enumerate(self.placement.ranges):
            now = found[number]
            if before.primary.server not in heard and now.origin == before.origin:
                kept = tuple(one for one in before.backups if one.server in heard and one != now.primary)
                anew = tuple(one for one in now.joining if one.server not in {other.server for other in kept})
                found[number] = msgspec.structs.replace(now, backups=kept, joining=anew)
        return tuple(found)


class _LeavesTheHeirAlone(ServerManager):
    def _evolve(self, heard: Mapping[str, Heard], goal: Sequence[Homes], version: int) -> tuple[Replicas, ...]:
        found = list(super()._evolve(heard, goal, version))
        for number, before in enumerate(self.placement.ranges):
            now = found[number]
            if before.handing == now.primary.server and before.primary.server in heard:
                found[number] = msgspec.structs.replace(now, backups=())
        return tuple(found)


# -- hot servers -------------------------------------------------------------------------------------------------------


class _ForgetsWhatIsHot(ServerManager):
    def __init__(self, num_replicas: int, placement: Placement, aim: Aim, held: Placement, *, by_load: bool) -> None:
        super().__init__(num_replicas, placement, held=held, by_load=by_load)


class _RelievesWhileThingsMove(ServerManager):
    def _is_in_place(self) -> bool:
        return True


class _RelievesWithoutGain(ServerManager):
    """Whoever is busiest gives something to whoever is not, whatever comes of it."""

    def _relieve(self, windows: Mapping[str, LoadWindow]) -> None:
        loads = {name: sum(window.costs.values()) for name, window in windows.items()}
        giver, taker = max(loads, key=lambda name: loads[name]), min(loads, key=lambda name: loads[name])
        if giver == taker or not loads[giver] or not self._is_in_place():
            return
        for number, homes in enumerate(self.aim.homes):
            if homes[0] == giver:
                places = {giver: taker, taker: giver}
                moved = tuple(places.get(home, home) for home in homes)
                goal = [*self.aim.homes[:number], moved, *self.aim.homes[number + 1 :]]
                self._keep_aim(goal, self.aim.sites, self.aim.num_bytes)
                return


class _RelievesNobody(ServerManager):
    def _relieve(self, windows: Mapping[str, LoadWindow]) -> None:
        pass


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _ForgetsTheDead(LeaseDispatcher):
    def bury(self, member: str) -> None:
        self._reports.pop(member, None)
        self._told.pop(member, None)


class _WaitsForTheForgotten(LeaseDispatcher):
    def _first_free(self) -> int:
        lease = super()._first_free()
        return -1 if any(lease < held for held in self._holder) else lease


class _RemembersNoPlacement(CoordinatorMemory):
    def remember(self, key: str, value: object) -> None:
        if key != "placement":
            super().remember(key, value)


class _GoesAtOnce(ServerMember):
    """A server that is asked to leave does not wait until others have what it holds."""

    def _on_leave(self) -> None:
        super()._on_leave()
        self._actions.append(Exit(Verdict.RELEASED, "it was asked to leave"))


_SERVED = ("sync", "async", "bounded")

OF_SERVERS = [
    mutated("acknowledges before the backup has it", "server deaths", _SERVED, num_replicas=2, keeper=_WaitsForNobody),
    mutated(
        "shows what its backups do not have", "server deaths", ("bounded",), num_replicas=3, keeper=_ShowsWhatOnlyItHas
    ),
    mutated("answers for what has moved as if it had not", "evictions", _SERVED, keeper=_AnswersForWhatMoved),
    mutated("takes a refusal of its forwards for consent", "evictions", _SERVED, keeper=_HearsNoRefusal),
    mutated(
        "refuses a forward once, and not when it comes again",
        "evictions",
        ("async",),
        num_replicas=2,
        keeper=_RefusesOnce,
    ),
    mutated("counts a lease as often as it comes", "server deaths", _SERVED, keeper=_CountsEveryPush),
    mutated("backs up the state and not what is in it", "server deaths", _SERVED, keeper=_KeepsNoRecord),
    mutated("brings others up without saying what is in the state", "moves", _SERVED, keeper=_SendsNoRecord),
    mutated("takes a forward as often as it comes", "evictions", _SERVED, num_replicas=2, keeper=_TakesForwardsAgain),
    mutated("loads a range that is there", "server deaths", _SERVED, keeper=_LoadsAgain),
    mutated("takes a broken connection for an answer", "server deaths", _SERVED, errand=_TakesLostForDone),
    mutated(
        "says once what is done, and asks for ever for what is lost",
        "losses",
        ("bounded",),
        num_replicas=1,
        errand=_SaysOnceWhatIsDone,
    ),
    mutated("makes a step of pushes of several generations", "commits", ("sync",), keeper=_MixesGenerations),
    mutated("commits with ranks missing", "commits", ("sync",), num_replicas=1, keeper=_CommitsWhatIsThere),
    mutated("hears commits of generations that are over", "commits", ("sync",), keeper=_HearsOldCommits),
    mutated("does not say of which attempt a step was made", "commits", ("sync",), keeper=_SaysNotWhatCounted),
    mutated("ignores the bound", "", ("bounded",), fewest_faults=0, keeper=_IgnoresTheBound),
    mutated("takes forwards of who is not primary", "evictions", _SERVED, keeper=_FollowsAnybody),
    mutated("goes on serving what it hands over", "moves", ("async",), keeper=_ServesWhileItHandsOver),
    mutated("hands over before others have everything", "moves", ("bounded",), num_replicas=3, keeper=_HandsOverAtOnce),
    mutated(
        "keeps what it had when it is brought up anew",
        "server deaths",
        ("async",),
        num_replicas=3,
        keeper=_KeepsWhatItHad,
    ),
    mutated("counts who is joining as a backup", "moves", _SERVED, manager=_CountsWhoIsJoining),
    mutated("makes who is joining primary", "moves", _SERVED, manager=_PromotesWhoIsJoining),
    mutated(
        "keeps the other backups when a primary died",
        "server deaths",
        _SERVED,
        num_replicas=3,
        manager=_KeepsBackupsOfTheDead,
    ),
    mutated("leaves the heir alone with what it was handed", "moves", _SERVED, manager=_LeavesTheHeirAlone),
    mutated("forgets at a restart what is hot", "restarts", _SERVED, manager=_ForgetsWhatIsHot, is_about_load=True),
    mutated(
        "relieves a server while ranges move", "moves", _SERVED, manager=_RelievesWhileThingsMove, is_about_load=True
    ),
    mutated("relieves servers though nobody gains", "moves", _SERVED, manager=_RelievesWithoutGain, is_about_load=True),
    mutated("leaves a hot server as it is", "loads", _SERVED, manager=_RelievesNobody, is_about_load=True),
    mutated("hands out nothing of what the dead held", "server deaths", _SERVED, dispatcher=_ForgetsTheDead),
    mutated("hands out nothing of what it forgot", "restarts", ("bounded",), dispatcher=_WaitsForTheForgotten),
    mutated("does not remember where the ranges are", "restarts", _SERVED, memory=_RemembersNoPlacement),
    mutated(
        "ends a server before others have what it holds", "moves", _SERVED, num_replicas=2, server_member=_GoesAtOnce
    ),
]
