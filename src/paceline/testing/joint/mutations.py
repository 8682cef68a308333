"""Faults put into what production runs, on purpose: the simulator must see each of them.

Each replaces a class of `paceline.control` or `paceline.server`; none changes what the simulator itself reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from paceline.control.choices import Choices
from paceline.control.coordinator import Coordinator
from paceline.control.coordinator_events import Event, Remember
from paceline.control.lease_set import LeaseSet
from paceline.control.leases import Desk, Hand
from paceline.control.member import Member
from paceline.control.member_events import Done, Exit, Leave
from paceline.control.messages import Directive, Phase, Plan, Report, Verdict
from paceline.control.serving import Aim, Change, ServerManager
from paceline.control.serving_member import ServerMember
from paceline.placement.evolving import Heard
from paceline.placement.gauge import Window
from paceline.placement.placement import Placement, Replicas
from paceline.placement.placing import Homes
from paceline.server.errand import Errand
from paceline.server.keeper import Keeper, Outcome, Tenure
from paceline.server.messages import Acknowledged, Answer, Apply, Commit, Forward, Load, Push, Refusal, Request, Stage


class Mutation(NamedTuple):
    """`mode`, `num_replicas` and the seed `shows_from` are those in which it shows soonest; elsewhere it would only
    cost time."""

    name: str
    mode: str = ""
    num_replicas: int = 0
    member: Callable[[str], Member] = Member
    server_member: Callable[[str], ServerMember] = ServerMember
    coordinator: Callable[..., Coordinator] = Coordinator
    choices: Callable[[float], Choices] = Choices
    keeper: Callable[..., Keeper] = Keeper
    errand: Callable[..., Errand] = Errand
    hand: Callable[[str], Hand] = Hand
    is_about_load: bool = False
    shows_from: int = 0


def _managed_by(manager: Callable[..., ServerManager]) -> Callable[..., Coordinator]:
    """A coordinator with another manager of servers."""

    class Managed(Coordinator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            mine = self._manager
            self._manager = manager(mine._num_replicas, mine.placement, mine.aim, by_load=mine._by_load)

    return Managed


def _with_desk(desk: Callable[..., Desk]) -> Callable[..., Coordinator]:
    """A coordinator that hands out leases in another way."""

    class Staffed(Coordinator):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._desk = desk(self._desk.remembered)

    return Staffed


# -- plans and operations ----------------------------------------------------------------------------------------------


class _KeepsNoPromise(Member):
    def _promise(self, fence: int) -> bool:
        is_news = fence > self.fenced
        self.fenced = max(fence, self.fenced)
        return is_news


class _LeavesEarly(Member):
    def _apply(self, plan: Plan, operation: int) -> None:
        super()._apply(plan, operation)
        if self.phase is Phase.ENDED:
            self._end(Verdict.RELEASED, "the end")


class _SwitchesAnywhere(Member):
    def _on_done(self, event: Done) -> None:
        super()._on_done(event)
        if self.agreed is not None and self.phase is Phase.ACTIVE:
            self._switch()


class _WaitsForNoPromise(Coordinator):
    def _recover(self) -> None:
        for record in self.census.participants(self.standing):
            record.report = msgspec.structs.replace(record.report, fenced=self.standing.fence)
        super()._recover()


class _IgnoresWhoIsAhead(Coordinator):
    def _recover(self) -> None:
        super()._recover()
        current = self.standing.current
        if current is not None and current.gifts and current.generation == self.standing.fence:
            self._keep(current=msgspec.structs.replace(current, gifts={}, base=current.base - 1))


class _SaysLess(Member):
    """One operation is settled when the next is done; whoever says less than it has applied lets it be undone."""

    def report(self) -> Report:
        report = super().report()
        return msgspec.structs.replace(report, applied=report.applied - 1) if report.applied > 0 else report


class _HoldsBeforeItHas(Member):
    """It counts as one that has the state when its group is there, and not when the state is."""

    def _start(self) -> None:
        if self.plan is not None and not self.holds_state:
            self.applied = max(0, self.plan.base)
        super()._start()


class _RemembersNoPlan(Coordinator):
    def _keep(self, **changes: object) -> None:
        super()._keep(**changes)
        if "current" in changes or "pending" in changes:
            self._actions.pop()


class _RemembersNoPlacement(Coordinator):
    def _place(self, change: Change) -> None:
        super()._place(change)
        self._actions = [
            action for action in self._actions if not (isinstance(action, Remember) and action.key == "placement")
        ]


# -- who lives, and who is told ----------------------------------------------------------------------------------------


class _GoesByTheClock(Coordinator):
    """A pause of its own counts as silence of the others."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock._stall_s = 1e9


class _SendsAPlanOnce(Choices):
    """Also where the connection that it went by is lost."""

    def lighten(self, directive: Directive, now: float) -> Directive:
        return super().lighten(directive, 0.0)

    def merge(self, events: Sequence[Event], has_line: Callable[[str], bool]) -> list[Event]:
        kept = dict(self._on_the_way)
        chosen = super().merge(events, has_line)
        self._on_the_way = kept
        return chosen


class _GoesAtOnce(ServerMember):
    """A server that is asked to leave does not wait until others have what it holds."""

    def _on_leave(self, event: Leave) -> None:
        super()._on_leave(event)
        self._actions.append(Exit(Verdict.RELEASED, "it was asked to leave"))


class _TakesAnyFounding(Keeper):
    def serve(self, request: Request, parcel: Any) -> Outcome:
        return super().serve(msgspec.structs.replace(request, began=-1), parcel)


# -- what is acknowledged, and shown -----------------------------------------------------------------------------------


class _WaitsForNobody(Keeper):
    def is_released(self, waits: dict[str, int]) -> bool:
        return True


class _ShowsWhatOnlyItHas(Keeper):
    def serve(self, request: Request, parcel: Any) -> Outcome:
        outcome = super().serve(request, parcel)
        return outcome._replace(waits={}) if request.push is None and request.commit is None else outcome


class _AnswersForWhatMoved(Keeper):
    def finish(self, outcome: Outcome) -> Answer:
        return outcome.answer


class _HearsNoRefusal(Keeper):
    def acknowledged(self, server: str, message: Acknowledged) -> None:
        super().acknowledged(server, Acknowledged(message.number))


class _RefusesOnce(Keeper):
    def take(self, sender: str, forward: Forward, parcel: Any) -> Acknowledged:
        is_known = forward.number <= self._taken.get(sender, 0)
        message = super().take(sender, forward, parcel)
        return Acknowledged(forward.number) if is_known else message


# -- what counts, once -------------------------------------------------------------------------------------------------


class _CountsEveryPush(Keeper):
    def _judge(self, tenure: Tenure, push: Push) -> bool | Refusal:
        return True if isinstance(push, Apply) else super()._judge(tenure, push)


class _KeepsNoRecord(Keeper):
    """As a backup: what was applied is in the state, but not in the set."""

    def _follow(self, ranges: Sequence[int], forward: Forward, parcel: Any) -> None:
        super()._follow(ranges, forward, parcel)
        if isinstance(forward.push, Apply):
            for number in ranges:
                if number in self._tenures:
                    self._tenures[number].leases = LeaseSet()


class _SendsNoRecord(Keeper):
    def _send(self, server: str, ranges: tuple[int, ...], parcel: Any, **content: Any) -> None:
        if content.get("record") is not None:
            content["record"] = msgspec.structs.replace(content["record"], epoch=0, prefix=0, beyond=(), step=0)
        super()._send(server, ranges, parcel, **content)


class _TakesForwardsAgain(Keeper):
    def take(self, sender: str, forward: Forward, parcel: Any) -> Acknowledged:
        self._taken.clear()
        return super().take(sender, forward, parcel)


class _LoadsAgain(Keeper):
    def _judge(self, tenure: Tenure, push: Push) -> bool | Refusal:
        return True if isinstance(push, Load) else super()._judge(tenure, push)


class _TakesLostForDone(Errand):
    def lost(self, server: str) -> None:
        if server in self._under_way:
            self.answered(server, Answer(0))


# -- steps -------------------------------------------------------------------------------------------------------------


class _MixesGenerations(Keeper):
    def serve(self, request: Request, parcel: Any) -> Outcome:
        if isinstance(request.push, Stage):
            request = msgspec.structs.replace(request, push=msgspec.structs.replace(request.push, generation=1))
        if request.commit is not None:
            request = msgspec.structs.replace(request, commit=msgspec.structs.replace(request.commit, generation=1))
        return super().serve(request, parcel)


class _CommitsWhatIsThere(Keeper):
    def _commit(self, ranges: Sequence[int], commit: Commit, refused: dict[int, Refusal]) -> None:
        for number in ranges:
            staged = self._tenures[number].staged.get((commit.generation, commit.step), ())
            if staged:
                commit = msgspec.structs.replace(commit, num_ranks=min(commit.num_ranks, len(staged)))
        super()._commit(ranges, commit, refused)


class _HearsOldCommits(Keeper):
    def _commit(self, ranges: Sequence[int], commit: Commit, refused: dict[int, Refusal]) -> None:
        super()._commit(ranges, msgspec.structs.replace(commit, by=1 << 30), refused)


class _SaysNotWhatCounted(Keeper):
    def _counted(self, tenures: dict[int, Tenure], request: Request) -> dict[int, Commit]:
        return {}


class _IgnoresTheBound(Keeper):
    def _is_seen(self, number: int, request: Request, pulled: dict[int, Refusal]) -> bool:
        assert request.pull is not None
        need = msgspec.structs.replace(request.pull, prefix=0)
        return super()._is_seen(number, msgspec.structs.replace(request, pull=need), pulled)


# -- who is primary ----------------------------------------------------------------------------------------------------


class _FollowsAnybody(Keeper):
    def _is_led_by(self, server: str, number: int) -> bool:
        return server != self.me or super()._is_led_by(server, number)


class _ServesWhileItHandsOver(Keeper):
    def _refusal(self, number: int, request: Request) -> Refusal | None:
        refusal = super()._refusal(number, request)
        tenure = self._tenures.get(number)
        is_handing = self._is_primary(number) and bool(self.placement.ranges[number].handing)
        return None if is_handing and tenure is not None and tenure.loaded else refusal


class _HandsOverAtOnce(Keeper):
    def heard(self) -> Heard:
        return super().heard()._replace(handed=frozenset(number for number, _ in self._handing))


class _KeepsWhatItHad(Keeper):
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
    def __init__(self, num_replicas: int, placement: Placement, aim: Aim, *, by_load: bool) -> None:
        super().__init__(num_replicas, placement, by_load=by_load)


class _RelievesWhileThingsMove(ServerManager):
    def _is_in_place(self) -> bool:
        return True


class _RelievesWithoutGain(ServerManager):
    """Whoever is busiest gives something to whoever is not, whatever comes of it."""

    def _relieve(self, windows: Mapping[str, Window]) -> None:
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
    def _relieve(self, windows: Mapping[str, Window]) -> None:
        pass


# -- the coordinator ---------------------------------------------------------------------------------------------------


class _ForgetsTheDead(Desk):
    def bury(self, member: str) -> None:
        self._reports.pop(member, None)
        self._told.pop(member, None)


class _WaitsForTheForgotten(Desk):
    def _first_free(self) -> int:
        lease = super()._first_free()
        return -1 if any(lease < held for held in self._holder) else lease


SOUND = Mutation("sound")
MUTATIONS = [
    Mutation("promises to leave a generation, and goes on in it", mode="allreduce", member=_KeepsNoPromise),
    Mutation("exits before all have acknowledged the end", mode="allreduce", member=_LeavesEarly),
    Mutation("switches where loop bodies have yet to run", mode="allreduce", member=_SwitchesAnywhere),
    Mutation("makes a plan before all have promised", mode="allreduce", coordinator=_WaitsForNoPromise),
    Mutation("starts from the one behind, not the one ahead", mode="allreduce", coordinator=_IgnoresWhoIsAhead),
    Mutation("says less than it has applied", mode="allreduce", member=_SaysLess),
    Mutation("counts as a holder of state that has not arrived", mode="allreduce", member=_HoldsBeforeItHas),
    Mutation("forgets what it told when it comes back", mode="allreduce", coordinator=_RemembersNoPlan),
    Mutation("forgets where the ranges are", coordinator=_RemembersNoPlacement),
    Mutation("takes its own pause for silence of the others", coordinator=_GoesByTheClock),
    Mutation("sends a plan once, whatever becomes of the connection", choices=_SendsAPlanOnce),
    Mutation("ends a server before others have what it holds", num_replicas=2, server_member=_GoesAtOnce),
    Mutation("serves workers of another founding", keeper=_TakesAnyFounding),
    Mutation("acknowledges before the backup has it", num_replicas=2, keeper=_WaitsForNobody),
    Mutation("shows what its backups do not have", mode="bounded", num_replicas=3, keeper=_ShowsWhatOnlyItHas),
    Mutation("answers for what has moved as if it had not", keeper=_AnswersForWhatMoved),
    Mutation("takes a refusal of its forwards for consent", keeper=_HearsNoRefusal),
    Mutation("refuses a forward once, and not when it comes again", mode="async", num_replicas=2, keeper=_RefusesOnce),
    Mutation("counts a lease as often as it comes", keeper=_CountsEveryPush),
    Mutation("backs up the state and not what is in it", keeper=_KeepsNoRecord),
    Mutation("brings others up without saying what is in the state", keeper=_SendsNoRecord),
    Mutation("takes a forward as often as it comes", num_replicas=2, keeper=_TakesForwardsAgain),
    Mutation("loads a range that is there", keeper=_LoadsAgain),
    Mutation("takes a broken connection for an answer", errand=_TakesLostForDone),
    Mutation("makes a step of pushes of several generations", mode="sync", keeper=_MixesGenerations),
    Mutation("commits with ranks missing", mode="sync", keeper=_CommitsWhatIsThere),
    Mutation("hears commits of generations that are over", mode="sync", keeper=_HearsOldCommits),
    Mutation("does not say of which attempt a step was made", mode="sync", keeper=_SaysNotWhatCounted),
    Mutation("ignores the bound", mode="bounded", keeper=_IgnoresTheBound),
    Mutation("takes forwards of who is not primary", keeper=_FollowsAnybody),
    Mutation("goes on serving what it hands over", keeper=_ServesWhileItHandsOver),
    Mutation("hands over before others have everything", mode="bounded", num_replicas=3, keeper=_HandsOverAtOnce),
    Mutation("keeps what it had when it is brought up anew", mode="async", num_replicas=3, keeper=_KeepsWhatItHad),
    Mutation("counts who is joining as a backup", coordinator=_managed_by(_CountsWhoIsJoining)),
    Mutation("makes who is joining primary", coordinator=_managed_by(_PromotesWhoIsJoining)),
    Mutation(
        "keeps the other backups when a primary died", num_replicas=3, coordinator=_managed_by(_KeepsBackupsOfTheDead)
    ),
    Mutation("leaves the heir alone with what it was handed", coordinator=_managed_by(_LeavesTheHeirAlone)),
    Mutation("forgets at a restart what is hot", coordinator=_managed_by(_ForgetsWhatIsHot), is_about_load=True),
    Mutation(
        "relieves a server while ranges move", coordinator=_managed_by(_RelievesWhileThingsMove), is_about_load=True
    ),
    Mutation("relieves servers though nobody gains", coordinator=_managed_by(_RelievesWithoutGain), is_about_load=True),
    Mutation("leaves a hot server as it is", coordinator=_managed_by(_RelievesNobody), is_about_load=True),
    Mutation("hands out nothing of what the dead held", coordinator=_with_desk(_ForgetsTheDead)),
    Mutation("hands out nothing of what it forgot", mode="bounded", coordinator=_with_desk(_WaitsForTheForgotten)),
]
