"""Who does which lease: the dispatcher, the holder, and the set of what is done."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.control.leases.dispatcher import LeaseDispatcher
from paceline.control.leases.holder import LeaseHolder
from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseDone, LeaseGrant, LeaseReport
from paceline.control.machines.coordinator import Coordinator
from paceline.control.machines.coordinator_events import Remember, RunSettings, TellLeases
from paceline.control.machines.member import Member
from paceline.control.machines.member_events import Exit
from paceline.control.messages.members import Directive, Introduction, Report, Verdict
from paceline.control.messages.plan import Phase
from paceline.placement.placement import Placement
from paceline.wire.card import Card

LEASES = st.sets(st.integers(0, 12))


def lease_set(leases: set[int], epoch: int = 0) -> LeaseSet:
    found = LeaseSet(epoch)
    found.add_all(leases)
    return found


class Epoch:
    """A dispatcher and hands that talk to each other without delay."""

    def __init__(
        self, num_leases: int, *names: str, dispatcher: LeaseDispatcher | None = None, begun: LeaseSet | None = None
    ) -> None:
        self.dispatcher = dispatcher or LeaseDispatcher()
        self.num_leases = num_leases
        self.term = 1
        self.begun = begun or LeaseSet()
        self.holders: dict[str, LeaseHolder] = {}
        for name in names:
            self.join(name)

    def join(self, name: str) -> LeaseHolder:
        holder = self.holders[name] = LeaseHolder(name)
        holder.open(0, self.num_leases, self.begun)
        self.talk(name)
        return holder

    def talk(self, name: str) -> None:
        self.dispatcher.take(self.holders[name].report())
        self.tell(self.dispatcher.grants(self.term, (name,)))

    def tell(self, grants: list[LeaseGrant]) -> None:
        for grant in grants:
            if grant.member in self.holders:
                self.holders[grant.member].hear(grant)

    def do(self, name: str) -> int:
        lease = self.holders[name].start()
        if lease >= 0:
            self.holders[name].finish(lease)
        self.talk(name)
        return lease

    def held(self, name: str) -> tuple[int, ...]:
        return self.holders[name].report().held


# -- the set -----------------------------------------------------------------------------------------------------------


@given(LEASES, LEASES)
def test_a_lease_set_is_a_set(one: set[int], other: set[int]) -> None:
    a, b = lease_set(one), lease_set(other)
    joined = a.copy()
    joined.update(b)
    assert joined == lease_set(one | other)
    assert a.meet(b) == lease_set(one & other)
    assert len(a) == len(one)
    assert all(a.has(0, lease) == (lease in one) for lease in range(14))
    assert all(a.reaches(0, prefix) == one.issuperset(range(prefix)) for prefix in range(14))


def test_all_of_an_earlier_epoch_are_done_and_none_of_a_later_one() -> None:
    found = lease_set({1}, epoch=2)
    assert found.has(1, 99)
    assert not found.has(3, 0)
    assert found.reaches(1, 99)
    assert not found.reaches(3, 1)
    assert found.reaches(3, 0)
    found.add(3, 5)
    assert found == lease_set({5}, epoch=3)
    assert lease_set({1}, epoch=2).meet(lease_set({7}, epoch=3)) == lease_set({1}, epoch=2)


# -- the dispatcher ----------------------------------------------------------------------------------------------------


def test_everybody_gets_what_it_wants_and_every_lease_is_done_once() -> None:
    epoch = Epoch(9, "a", "b")
    assert (epoch.held("a"), epoch.held("b")) == ((0, 1), (2, 3))
    done = []
    while not all(holder.is_finished for holder in epoch.holders.values()):
        done += [lease for lease in (epoch.do("a"), epoch.do("b")) if lease >= 0]
    assert sorted(done) == list(range(9))


def test_the_leases_of_the_dead_go_to_others_at_once() -> None:
    epoch = Epoch(9, "a", "b")
    epoch.dispatcher.bury("a")
    epoch.tell(epoch.dispatcher.grants(1))
    assert epoch.held("b") == (0, 1, 2, 3)


def test_who_is_idle_takes_what_a_slower_one_has_not_started() -> None:
    epoch = Epoch(4, "a", "b")
    assert epoch.holders["a"].start() == 0
    epoch.talk("a")
    assert [epoch.do("b"), epoch.do("b")] == [2, 3]
    assert epoch.held("b") == (1,)
    epoch.talk("a")
    assert epoch.held("a") == (0,)


def test_what_was_started_is_not_taken_back_also_if_it_is_not_the_lowest() -> None:
    dispatcher = LeaseDispatcher()
    dispatcher.take(LeaseReport("a", 0, 2, wants=2))
    ((*_, first),) = [dispatcher.grants(1)]
    dispatcher.take(LeaseReport("a", 0, 2, heard=first.number, wants=2, held=(0, 1), started=1))
    dispatcher.take(LeaseReport("b", 0, 2, wants=2))
    assert {grant.member: grant.leases for grant in dispatcher.grants(1)} == {"a": (1,), "b": (0,)}


def test_who_leaves_gets_nothing_more_and_what_it_puts_back_is_done_by_others() -> None:
    epoch = Epoch(9, "a", "b")
    epoch.dispatcher.take(LeaseReport("a", 0, 9, heard=1, wants=0))
    epoch.tell(epoch.dispatcher.grants(1))
    assert epoch.held("b") == (0, 1, 2, 3)


def test_who_asks_for_an_epoch_that_is_over_hears_that_it_is() -> None:
    dispatcher = LeaseDispatcher()
    dispatcher.take(LeaseReport("a", 1, 5, wants=1))
    dispatcher.take(LeaseReport("b", 0, 5, wants=1))
    grants = {grant.member: grant for grant in dispatcher.grants(1, ("b",))}
    assert grants["b"].epoch == 0
    assert grants["b"].is_finished


def test_a_desk_that_has_forgotten_learns_from_what_workers_say() -> None:
    before = Epoch(9, "a", "b")
    before.do("a")
    after = Epoch(9, dispatcher=LeaseDispatcher((0, 0)))
    after.term, after.holders = 2, before.holders
    after.talk("a")
    after.talk("b")
    assert after.dispatcher.done == lease_set({0})
    assert (after.held("a"), after.held("b")) == ((1, 4), (2, 3))


def test_a_desk_whose_journal_was_lost_hands_out_nothing_that_was_remembered_as_done() -> None:
    """Nobody speaks any more of what is remembered: who was told so says up to where."""
    epoch = Epoch(20, "a", "b")
    for _ in range(5):
        epoch.do("a")
        epoch.do("b")
    epoch.dispatcher.remembered = epoch.dispatcher.to_remember() or (-1, 0)
    assert epoch.dispatcher.remembered == (0, 10)
    epoch.talk("a")
    epoch.talk("b")
    assert not any(holder.report().done for holder in epoch.holders.values())
    epoch.dispatcher, epoch.term = LeaseDispatcher(), 2
    epoch.talk("a")
    assert epoch.dispatcher.done == lease_set(set(range(10)))
    again = [epoch.do(name) for _ in range(6) for name in ("a", "b")]
    assert set(again) - {-1} == set(range(10, 20))


def test_a_desk_that_has_forgotten_hands_out_what_those_that_are_held_may_wait_for() -> None:
    before = Epoch(9, "dead", "b")
    after = Epoch(9, dispatcher=LeaseDispatcher())
    after.term, after.holders = 2, {"b": before.holders["b"]}
    assert after.held("b") == (2, 3)
    after.talk("b")
    assert after.held("b") == (0, 2, 3)
    assert after.holders["b"].start() == 0


def test_what_was_done_before_the_run_is_not_done_again() -> None:
    epoch = Epoch(5, "a", begun=lease_set({0, 1, 3}))
    assert epoch.held("a") == (2, 4)
    assert [epoch.do("a"), epoch.do("a")] == [2, 4]
    assert epoch.holders["a"].is_finished


def test_what_is_remembered_and_what_was_begun_with_is_counted_once() -> None:
    epoch = Epoch(6, "a", dispatcher=LeaseDispatcher((0, 4)), begun=lease_set({0, 2}))
    assert not epoch.holders["a"].is_finished
    assert epoch.held("a") == (4, 5)


def test_what_somebody_began_with_counts_whoever_came_first() -> None:
    epoch = Epoch(5, "a")
    epoch.begun = lease_set({2, 3, 4})
    epoch.join("b")
    assert {epoch.do("a"), epoch.do("b")} == {0, 1}
    assert epoch.holders["b"].is_finished


def test_a_run_that_is_founded_anew_counts_only_what_it_began_with() -> None:
    before = Epoch(6, "a", "b", dispatcher=LeaseDispatcher((0, 1)))
    before.do("a")
    before.do("b")
    before.dispatcher.forget()
    assert before.dispatcher.to_remember() is None
    after = Epoch(6, "c", dispatcher=before.dispatcher, begun=lease_set({0, 2}))
    assert [after.do("c") for _ in range(4)] == [1, 3, 4, 5]
    assert after.holders["c"].is_finished


@pytest.mark.parametrize("remembered", [(-1, 0), (0, 2)])
def test_only_progress_is_remembered(remembered: tuple[int, int]) -> None:
    epoch = Epoch(9, "a", dispatcher=LeaseDispatcher(remembered))
    for _ in range(3):
        epoch.do("a")
    assert epoch.dispatcher.to_remember() == (0, remembered[1] + 3)
    epoch.dispatcher.remembered = (0, remembered[1] + 3)
    assert epoch.dispatcher.to_remember() is None


# -- the holder --------------------------------------------------------------------------------------------------------


def holder(*leases: int) -> LeaseHolder:
    found = LeaseHolder("a")
    found.open(0, 20, LeaseSet())
    found.hear(LeaseGrant(1, 1, "a", 0, leases))
    return found


def test_an_older_grant_and_one_of_another_epoch_change_nothing() -> None:
    worker = holder(1, 2)
    worker.hear(LeaseGrant(1, 1, "a", 0, (7,)))
    worker.hear(LeaseGrant(2, 9, "a", 1, (8,)))
    assert worker.report().held == (1, 2)
    worker.hear(LeaseGrant(2, 1, "a", 0, (9,)))
    assert worker.report().held == (9,)


def test_what_was_started_is_kept_and_what_is_done_is_not_taken_again() -> None:
    worker = holder(1, 2)
    assert worker.start() == 1
    worker.hear(LeaseGrant(1, 2, "a", 0, (2,)))
    assert worker.report().held == (1, 2)
    worker.finish(1)
    worker.hear(LeaseGrant(1, 3, "a", 0, (1, 2)))
    assert worker.report().held == (2,)
    assert worker.report().done == (LeaseDone(1),)


def test_what_is_remembered_as_done_is_said_no_more() -> None:
    worker = holder(0, 1)
    worker.finish(worker.start())
    worker.hear(LeaseGrant(1, 2, "a", 0, (1,), settled=1, prefix=1))
    assert worker.report().done == ()
    assert worker.settled == 1


def test_a_lower_lease_that_comes_goes_first_if_what_was_started_is_put_back() -> None:
    worker = holder(5)
    worker.start()
    worker.hear(LeaseGrant(1, 2, "a", 0, (3, 5)))
    assert worker.gives_way()
    assert worker.start() == 3
    assert not worker.gives_way()
    assert worker.num_held() == 2


def test_a_desk_that_has_forgotten_believes_who_was_told_that_all_is_done() -> None:
    """Else it would hand leases that a dead worker had done to somebody who has gone on, and all would wait."""
    worker = holder(0, 1)
    worker.hear(LeaseGrant(1, 2, "a", 0, (), is_finished=True))
    dispatcher = LeaseDispatcher()
    dispatcher.take(worker.report())
    dispatcher.take(LeaseReport("b", 0, worker.report().num_leases, wants=2))
    assert {grant.member: (grant.leases, grant.is_finished) for grant in dispatcher.grants(2)} == {
        "a": ((), True),
        "b": ((), True),
    }


def test_who_is_let_go_in_the_middle_of_a_lease_waits_for_no_server() -> None:
    """Its lease is another's, and the run may end, and its servers with it, before the push is through."""
    member = Member("A")
    member.handle(Directive(1, 1, "A", Verdict.KNOWN, placement=Placement(1)))
    assert not member.is_dismissed
    assert [type(action) for action in member.handle(Directive(1, 2, "A", Verdict.RELEASED))] == [Exit]
    assert member.is_dismissed
    assert member.handle(Directive(1, 3, "A", Verdict.RELEASED, placement=Placement(2))) == []


def test_a_desk_that_comes_back_after_the_end_was_asked_for_hands_out_nothing() -> None:
    dispatcher = LeaseDispatcher((0, 2))
    dispatcher.stop_again(whole=-1)
    dispatcher.take(LeaseReport("A", 0, 4, wants=2))
    (grant,) = dispatcher.grants(1, ["A"])
    assert (grant.leases, grant.is_stopped, grant.is_finished) == ((), True, False)


def test_who_was_told_that_an_epoch_is_finished_hears_nothing_else_from_a_desk_that_is_stopped_at_once() -> None:
    """The end is asked for when a coordinator has just come back, and has heard no worker yet."""
    dispatcher = LeaseDispatcher()
    dispatcher.take(LeaseReport("A", 0, 2, done=(LeaseDone(0), LeaseDone(1))))
    assert [grant.is_finished for grant in dispatcher.grants(1)] == [True]
    again = LeaseDispatcher(dispatcher.to_remember() or (-1, 0))
    again.stop()
    again.take(LeaseReport("B", 0, 2, wants=2))
    (grant,) = again.grants(2, ["B"])
    assert (grant.is_finished, grant.is_stopped) == (True, False)
    third = LeaseDispatcher(again.remembered)
    third.stop_again(again.whole)
    third.take(LeaseReport("B", 1, 2, wants=2))
    (grant,) = third.grants(3, ["B"])
    assert (grant.is_finished, grant.is_stopped, grant.leases) == (False, True, ())


def test_that_an_epoch_is_finished_is_remembered_before_it_is_said() -> None:
    coordinator = Coordinator(RunSettings(wanted=1), 0.0)
    card = Card("A", "worker", "h", ("", 0), "", b"", False, ())
    coordinator.handle(Report("A", 1, 1, Phase.READY, introduction=Introduction(card, 1, "h", "", leased=True)), 0.0)
    actions = coordinator.handle(LeaseReport("A", 0, 2, done=(LeaseDone(0), LeaseDone(1))), 0.1)
    kinds = [type(action) for action in actions if isinstance(action, Remember | TellLeases)]
    assert kinds == [Remember, TellLeases]
    (remembered,) = [action.value for action in actions if isinstance(action, Remember)]
    assert remembered == msgspec.msgpack.encode((1, 0))


def test_an_epoch_that_was_whole_when_the_end_was_asked_for_is_finished_by_the_next_desk_too() -> None:
    dispatcher = LeaseDispatcher()
    dispatcher.take(LeaseReport("A", 0, 2, done=(LeaseDone(0), LeaseDone(1))))
    dispatcher.stop()
    again = LeaseDispatcher(dispatcher.to_remember() or (-1, 0))
    again.stop_again(dispatcher.whole)
    again.take(LeaseReport("B", 0, 2, wants=2))
    (grant,) = again.grants(2, ["B"])
    assert (grant.is_finished, grant.is_stopped) == (True, False)
    again.take(LeaseReport("B", 1, 2, wants=2))  # the next epoch is not begun any more
    (grant,) = again.grants(2, ["B"])
    assert (grant.leases, grant.is_stopped) == ((), True)
