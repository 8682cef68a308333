"""What a server does about requests, forwards and placements, case by case."""

from __future__ import annotations

import pytest

from paceline.placement.placement import Replica, Replicas
from paceline.server.messages import ApplyLease, CommitStep, Fence, Load, Need, Refusal, ServerRequest, StageStep
from tests.server.keeper_cases import Group, replicas

# -- who may ask for what ----------------------------------------------------------------------------------------------


def test_only_the_primary_serves_and_others_say_that_it_moved() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    assert group.ask("b", push=ApplyLease(0, 0)).answer.pushed == {0: Refusal.MOVED}
    assert group.ask("a", push=ApplyLease(0, 0)).answer.pushed == {}


def test_who_goes_by_a_newer_placement_than_the_server_asks_again_later() -> None:
    group = Group("a", replicas("z"))
    outcome = group.keepers["a"].serve(ServerRequest(group.version + 1, (0, 7), push=ApplyLease(0, 0)), None)
    assert outcome.answer.pushed == {0: Refusal.EARLY, 7: Refusal.EARLY}


def test_who_is_of_another_founding_than_the_server_changes_and_sees_nothing() -> None:
    """A run that is founded anew: its workers may hear of it before the servers do, or long after."""
    group = Group("a", replicas("a"))
    group.load("a")
    keeper = group.keepers["a"]
    began, version = keeper.placement.began, group.version
    newer = ServerRequest(version + 1, (0,), push=ApplyLease(0, 0), pull=Need(), began=version + 1)
    assert keeper.serve(newer, None).answer.pushed == {0: Refusal.EARLY}
    assert keeper.serve(newer, None).answer.pulled == {0: Refusal.EARLY}
    older = ServerRequest(version, (0,), push=ApplyLease(0, 0), pull=Need(), began=began - 5)
    assert keeper.serve(older, None).answer.pushed == {0: Refusal.MOVED}
    assert group.log("a") == []
    same = ServerRequest(version, (0,), push=ApplyLease(0, 0), began=began)
    assert not keeper.serve(same, None).answer.pushed
    assert group.log("a") == [("lease", 0, 0)]


def test_a_range_is_empty_until_it_is_loaded_and_is_loaded_once() -> None:
    group = Group("a", replicas("a"))
    assert group.ask("a", pull=Need()).answer.pulled == {0: Refusal.EMPTY}
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    assert not group.ask("a", push=Load(1), parcel=[("since", 1, 0)]).answer.pushed
    assert group.log("a") == [("lease", 0, 0)]


def test_a_load_for_another_origin_changes_nothing() -> None:
    group = Group("a", replicas("a"))
    group.ask("a", push=Load(9), parcel=[("since", 9, 0)])
    assert group.ask("a", pull=Need()).answer.pulled == {0: Refusal.EMPTY}


def test_each_range_of_a_request_is_judged_for_itself() -> None:
    group = Group("ab", replicas("a"), replicas("b"), replicas("a"))
    group.load("a", 0)
    outcome = group.ask("a", 0, 1, 2, push=ApplyLease(0, 0), pull=Need())
    assert outcome.answer.pushed == {1: Refusal.MOVED, 2: Refusal.EMPTY}
    assert outcome.parcel == {0: (("since", 1, 0), ("lease", 0, 0))}


# -- bringing up -------------------------------------------------------------------------------------------------------


def states_in(group: Group, sender: str, receiver: str) -> list[int]:
    """The ranges whose states are on their way."""
    return [forward.ranges[0] for forward, _ in group.keepers[sender].links[receiver].queue if forward.snapshot]


def test_states_of_ranges_go_one_at_a_time_and_the_last_one_has_all_that_came_meanwhile() -> None:
    """Whoever pushes waits behind one of them at most."""
    group = Group("ab", *[replicas("a") for _ in range(3)])
    group.load("a", 0, 1, 2)
    group.tell(*[replicas("a", joining=[("b", 2)]) for _ in range(3)])
    assert states_in(group, "a", "b") == [0]
    outcome = group.ask("a", 0, 2, push=ApplyLease(0, 0))
    assert not group.is_free("a", outcome), "b has, or will have, range 0"
    group.deliver("a", most=1)
    assert states_in(group, "a", "b") == [1], "behind the push"
    group.deliver("a", most=1)
    assert group.is_free("a", outcome), "of range 2 nothing is on its way, nor is range 1 waited for"
    while group.deliver("a"):
        pass
    assert [group.log("b", number) for number in range(3)] == [[("lease", 0, 0)], [], [("lease", 0, 0)]]
    assert group.keepers["b"].heard().synced == {0, 1, 2}


def test_who_waits_for_a_range_that_is_not_brought_up_yet_waits_for_nobody() -> None:
    group = Group("ab", replicas("a"), replicas("a"))
    group.load("a", 0, 1)
    group.tell(replicas("a", joining=[("b", 2)]), replicas("a", joining=[("b", 2)]))
    assert group.is_free("a", group.ask("a", 1, push=ApplyLease(0, 0)))
    assert not group.is_free("a", group.ask("a", 0, push=ApplyLease(0, 0)))


def test_a_range_that_is_to_be_brought_up_no_more_is_not() -> None:
    group = Group("ab", *[replicas("a") for _ in range(3)])
    group.load("a", 0, 1, 2)
    group.tell(*[replicas("a", joining=[("b", 2)]) for _ in range(3)])
    group.tell(replicas("a", joining=[("b", 2)]), replicas("a"), replicas("a", joining=[("b", 2)]))
    group.deliver("a", most=1)
    assert states_in(group, "a", "b") == [2]


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_lease_counts_once() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    for _ in range(3):
        assert not group.ask("a", push=ApplyLease(0, 4)).answer.pushed
    assert group.log("a") == [("lease", 0, 4)]


def test_a_lease_counts_once_after_the_death_of_the_primary() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 4))
    group.deliver("a")  # and a dies before it answers
    group.tell(replicas("b"), who="b")
    assert not group.ask("b", push=ApplyLease(0, 4)).answer.pushed
    assert group.log("b") == [("lease", 0, 4)]


def test_a_lease_counts_once_where_the_range_was_brought() -> None:
    group = Group("ab", replicas("a"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 4))
    group.tell(replicas("a", joining=[("b", 2)]))
    group.deliver("a")
    group.tell(replicas("b", since=2))
    group.ask("b", push=ApplyLease(0, 4))
    assert group.log("b") == [("lease", 0, 4)]


def test_a_lease_of_an_epoch_that_is_over_is_done() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    group.ask("a", push=ApplyLease(1, 0))
    assert not group.ask("a", push=ApplyLease(0, 7)).answer.pushed
    assert group.log("a") == [("lease", 1, 0)]


def test_a_pull_waits_for_the_leases_that_it_must_see() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 1))
    assert group.ask("a", pull=Need(epoch=0, prefix=2)).answer.pulled == {0: Refusal.EARLY}
    group.ask("a", push=ApplyLease(0, 0))
    assert not group.ask("a", pull=Need(epoch=0, prefix=2)).answer.pulled


def test_leases_that_were_lost_are_not_waited_for_once_they_are_known_to_be_done() -> None:
    group = Group("a", replicas("a"))
    group.load("a", restored=True, epoch=0, prefix=1)
    assert group.ask("a", pull=Need(epoch=0, prefix=3)).answer.pulled == {0: Refusal.EARLY}
    assert not group.ask("a", pull=Need(epoch=0, prefix=3, settled=3)).answer.pulled


def test_what_is_known_to_be_done_is_waited_for_where_nothing_was_lost() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    assert group.ask("a", pull=Need(epoch=0, prefix=3, settled=3)).answer.pulled == {0: Refusal.EARLY}


# -- steps -------------------------------------------------------------------------------------------------------------


def test_what_is_staged_counts_by_a_commit_that_finds_all_ranks() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    group.ask("a", push=StageStep(1, 1, 0), parcel="zero")
    assert group.ask("a", commit=CommitStep(1, 1, 2, 1.0)).answer.pushed == {0: Refusal.EARLY}
    group.ask("a", push=StageStep(1, 1, 1), parcel="one")
    assert not group.ask("a", commit=CommitStep(1, 1, 2, 1.0), pull=Need(step=1)).answer.pulled
    assert group.log("a") == [("step", 1, ((0, "zero"), (1, "one")))]


def test_a_commit_and_a_push_come_again_and_count_once() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    for _ in range(2):
        assert not group.ask("a", push=StageStep(1, 1, 0), parcel="zero").answer.pushed
        assert not group.ask("a", commit=CommitStep(1, 1, 1, 1.0)).answer.pushed
    assert group.log("a") == [("step", 1, ((0, "zero"),))]


def test_a_pull_waits_for_the_step_that_it_must_see() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    assert group.ask("a", pull=Need(step=1)).answer.pulled == {0: Refusal.EARLY}


def test_a_later_generation_does_the_step_again_and_the_earlier_one_is_over() -> None:
    group = Group("a", replicas("a"))
    group.load("a")
    group.ask("a", push=StageStep(1, 1, 0), parcel="old")
    group.ask("a", push=StageStep(2, 1, 0), parcel="new")
    assert group.ask("a", push=StageStep(1, 1, 1), parcel="old").answer.pushed == {0: Refusal.STALE}
    assert group.ask("a", commit=CommitStep(1, 1, 1, 1.0)).answer.pushed == {0: Refusal.STALE}
    assert not group.ask("a", commit=CommitStep(2, 1, 1, 1.0)).answer.pushed
    assert group.log("a") == [("step", 1, ((0, "new"),))]
    assert group.stores["a"].staged[0] == {}


def test_who_does_a_step_again_hears_of_which_attempt_it_was_made_and_makes_it_everywhere() -> None:
    group = Group("a", replicas("a"), replicas("a"))
    group.load("a", 0, 1)
    group.ask("a", 0, 1, push=StageStep(1, 1, 0), parcel="old")
    commit = CommitStep(1, 1, 1, 1.0)
    group.ask("a", 0, commit=commit)  # and its worker dies before it has told the other range
    outcome = group.ask("a", 0, 1, push=Fence(2, 1))
    assert group.answer("a", outcome).counted == {0: commit}
    assert not group.ask("a", 0, 1, commit=CommitStep(1, 1, 1, 1.0, by=2)).answer.pushed
    assert group.log("a", 0) == group.log("a", 1) == [("step", 1, ((0, "old"),))]
    assert group.stores["a"].staged == {0: {}, 1: {}}


def test_what_was_lost_in_the_middle_of_a_step_does_not_stop_it() -> None:
    group = Group("a", replicas("a"))
    group.load("a", restored=True, step=3)
    group.ask("a", push=StageStep(1, 4, 1), parcel="one")  # what rank 0 staged was lost
    assert not group.ask("a", commit=CommitStep(1, 4, 2, 1.0), pull=Need(step=4)).answer.pulled
    assert group.log("a") == []
    assert group.stores["a"].staged[0] == {}


def test_later_steps_of_a_restored_range_are_made_of_whole_attempts_or_lost_too() -> None:
    group = Group("a", replicas("a"))
    group.load("a", restored=True, step=3)
    group.ask("a", push=StageStep(1, 4, 0), parcel="zero")
    group.ask("a", commit=CommitStep(1, 4, 1, 1.0))
    assert not group.ask("a", commit=CommitStep(1, 5, 1, 1.0)).answer.pushed  # staged at who was taken for dead
    group.ask("a", push=StageStep(1, 6, 0), parcel="zero")
    group.ask("a", commit=CommitStep(1, 6, 1, 1.0))
    assert [entry[1] for entry in group.log("a")] == [4, 6]


# -- answers wait for backups ------------------------------------------------------------------------------------------


def test_an_answer_is_free_when_all_replicas_have_what_it_speaks_of() -> None:
    group = Group("abc", replicas("a", "b", joining=[("c", 1)]))
    group.load("a")
    outcome = group.ask("a", push=ApplyLease(0, 0))
    assert not group.is_free("a", outcome)
    group.deliver("a", "b")
    assert not group.is_free("a", outcome)
    group.deliver("a", "c")
    assert group.is_free("a", outcome)
    assert group.log("a") == group.log("b") == group.log("c")


def test_nothing_is_shown_that_a_backup_does_not_have() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    outcome = group.ask("a", pull=Need())
    assert not group.is_free("a", outcome)
    group.deliver("a")
    assert group.is_free("a", outcome)


def test_who_is_gone_is_waited_for_until_a_placement_says_so() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    outcome = group.ask("a", push=ApplyLease(0, 0))
    group.tell(replicas("a"), who="a")
    assert not group.answer("a", outcome).pushed


def test_an_answer_does_not_wait_for_a_link_that_is_no_more() -> None:
    group = Group("ab", replicas("a", "b"), replicas("b", "a"))
    group.load("a", 0)
    group.load("b", 1)
    outcome = group.ask("a", 0, push=ApplyLease(0, 0))
    group.tell(replicas("a"), replicas("b", "a"), who="a")  # b is let go,
    group.tell(replicas("a"), replicas("a", "b"), who="a")  # and backs up what it has handed over
    assert not group.answer("a", outcome).pushed


def test_what_moved_before_the_answer_was_free_is_to_be_asked_for_again() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    outcome = group.ask("a", push=ApplyLease(0, 0), pull=Need())
    group.tell(replicas("b", joining=[("a", 2)]))
    answer = group.answer("a", outcome)
    assert answer.pushed == answer.pulled == {0: Refusal.MOVED}


# -- replicas ----------------------------------------------------------------------------------------------------------


def test_a_forward_that_comes_again_counts_once() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    ((forward, parcel),) = group.keepers["a"].links["b"].queue
    for _ in range(2):
        assert group.keepers["b"].take("a", forward, parcel).refused == ()
    assert group.log("b") == [("lease", 0, 0)]


@pytest.mark.parametrize("times", [1, 2])
def test_forwards_of_who_is_not_primary_any_more_are_refused_however_often_they_come(times: int) -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    outcome = group.ask("a", push=ApplyLease(0, 0))
    group.tell(replicas("b"), who="b")  # a was taken for dead
    ((forward, parcel),) = group.keepers["a"].links["b"].queue
    for _ in range(times):
        message = group.keepers["b"].take("a", forward, parcel)
    group.keepers["a"].acknowledged("b", message)
    assert group.log("b") == []
    assert group.answer("a", outcome).pushed == {0: Refusal.MOVED}
    assert group.ask("a", pull=Need()).answer.pulled == {0: Refusal.MOVED}


def test_a_refusal_holds_until_the_version_by_which_it_was_made() -> None:
    group = Group("abc", replicas("a", "b", "c"))
    group.load("a")
    outcome = group.ask("a", push=ApplyLease(0, 0))
    second = group.tell(replicas("a", "b", "c"), who="c")
    group.tell(replicas("b", joining=[("c", 3)]), who="b")
    group.deliver("a", "b")
    group.keepers["a"].adopt(second)  # older than the one by which b refused
    group.deliver("a", "c")
    assert group.answer("a", outcome).pushed == {0: Refusal.MOVED}


def test_a_forward_from_before_a_tenure_is_not_for_it() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    ((forward, parcel),) = group.keepers["a"].links["b"].queue
    group.tell(replicas("a"))
    group.tell(replicas("a", joining=[("b", 3)]))
    group.deliver("a")
    group.keepers["b"]._taken.clear()  # as if it came on another connection
    assert group.keepers["b"].take("a", forward, parcel).refused == ()
    assert group.log("b") == [("lease", 0, 0)]


def test_who_joins_has_everything_when_it_has_the_snapshot() -> None:
    group = Group("ab", replicas("a"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    group.ask("a", push=StageStep(1, 1, 0), parcel="zero")
    group.tell(replicas("a", joining=[("b", 2)]))
    group.ask("a", push=ApplyLease(0, 1))
    assert group.keepers["b"].heard().synced == frozenset()
    group.deliver("a", most=1)
    assert group.keepers["b"].heard().synced == {0}
    group.deliver("a")
    assert group.stores["b"].logs == group.stores["a"].logs
    assert group.stores["b"].staged == group.stores["a"].staged


def test_changes_before_the_snapshot_are_not_made_by_who_joins() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    ((forward, parcel),) = group.keepers["a"].links["b"].queue
    group.tell(replicas("a", joining=[("b", 2)]), who="b")
    group.keepers["b"].take("a", forward, parcel)
    assert 0 not in group.stores["b"].logs


def test_who_is_brought_up_anew_forgets_what_it_had() -> None:
    group = Group("abc", replicas("a", "b", "c"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    group.deliver("a", "c")  # and not to b, who is primary then
    group.tell(replicas("b", joining=[("c", 2)]), who="bc")
    assert 0 not in group.stores["c"].logs
    group.deliver("b")
    assert group.log("c") == group.log("b") == []


def test_a_range_that_was_lost_starts_empty_and_can_be_loaded_with_what_is_known() -> None:
    group = Group("ab", replicas("a"))
    group.load("a")
    group.tell(replicas("b", since=2, origin=2))
    assert group.ask("b", pull=Need()).answer.pulled == {0: Refusal.EMPTY}
    group.load("b", restored=True, epoch=1, prefix=4)
    assert not group.ask("b", push=ApplyLease(1, 3)).answer.pushed
    assert group.log("b") == []
    assert not group.ask("b", pull=Need(epoch=1, prefix=4)).answer.pulled


# -- handing over ------------------------------------------------------------------------------------------------------


def test_a_hand_over_takes_nothing_new_and_is_said_when_nothing_is_under_way() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    group.tell(replicas("a", "b", handing="b", handing_since=2))
    assert group.ask("a", push=ApplyLease(0, 1)).answer.pushed == {0: Refusal.EARLY}
    assert group.keepers["a"].heard().handed == frozenset()
    group.deliver("a")
    assert group.keepers["a"].heard().handed == {0}


def test_a_hand_over_does_not_wait_for_other_ranges() -> None:
    group = Group("ab", replicas("a", "b"), replicas("a", "b"))
    group.load("a", 0, 1)
    group.tell(replicas("a", "b", handing="b", handing_since=2), replicas("a", "b"))
    group.ask("a", 1, push=ApplyLease(0, 0))
    assert group.keepers["a"].heard().handed == {0}


def test_the_old_primary_backs_up_the_new_one_with_what_it_has() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    group.deliver("a")
    group.tell(replicas("a", "b", handing="b", handing_since=2))
    group.tell(replicas("b", "a"))
    outcome = group.ask("b", push=ApplyLease(0, 1))
    assert not group.is_free("b", outcome)
    group.deliver("b")
    assert group.log("a") == group.log("b") == [("lease", 0, 0), ("lease", 0, 1)]


# -- what is lost ------------------------------------------------------------------------------------------------------


def test_leases_that_a_restored_range_never_got_are_named_whoever_asked_first() -> None:
    """A pull of rows asks for no records, and its answer may be lost: what it makes count is told to the next one."""
    group = Group("a", replicas("a"))
    group.load("a", restored=True, epoch=1, prefix=2, num_leases=10)
    group.ask("a", push=ApplyLease(1, 4))
    need = Need(epoch=1, prefix=6, settled=6)
    first = group.ask("a", pull=need).answer
    assert (first.pulled, first.forgone) == ({}, {})
    for _ in range(2):
        assert group.ask("a", pull=need, notes=True).answer.forgone == {0: ((13, 14), (16, 16))}
    assert group.ask("a", push=ApplyLease(1, 6), pull=Need(), notes=True).answer.forgone == {0: ((13, 14), (16, 16))}


@pytest.mark.parametrize("begins", ["a push", "a pull"])
def test_what_a_restored_range_lacks_of_an_epoch_is_named_when_the_next_one_has_begun(begins: str) -> None:
    group = Group("a", replicas("a"))
    group.load("a", restored=True, epoch=0, prefix=7, num_leases=10)
    group.ask("a", push=ApplyLease(0, 8))
    if begins == "a push":
        group.ask("a", push=ApplyLease(2, 0))
    else:
        group.ask("a", pull=Need(epoch=2))
    assert group.ask("a", pull=Need(), notes=True).answer.forgone == {0: ((8, 8), (10, 20))}


def test_a_backup_and_whoever_gets_the_state_from_it_name_what_the_primary_had_lost() -> None:
    group = Group("abc", replicas("a", "b"))
    group.load("a", restored=True, num_leases=10)
    group.ask("a", push=ApplyLease(1, 0))
    group.deliver("a")
    group.tell(replicas("b", joining=[("c", 2)]))
    group.deliver("b")
    group.tell(Replicas(Replica("c", 2), origin=1))
    assert group.ask("c", pull=Need(), notes=True).answer.forgone == {0: ((1, 10),)}


def test_a_step_whose_pushes_are_gone_is_named_by_every_commit_from_then_on() -> None:
    group = Group("a", replicas("a"))
    group.load("a", restored=True, step=3)
    group.ask("a", push=StageStep(1, 4, 0))
    for _ in range(2):
        assert group.ask("a", commit=CommitStep(1, 4, 2, 1.0)).answer.forgone == {0: ((4, 4),)}


def test_of_ranges_that_were_not_lost_nothing_is_given_up() -> None:
    group = Group("a", replicas("a"))
    group.load("a", epoch=1, prefix=2, num_leases=10)
    answer = group.ask("a", pull=Need(epoch=1, prefix=5, settled=5), notes=True).answer
    assert (answer.pulled, answer.forgone) == ({0: Refusal.EARLY}, {})


# -- without a coordinator ---------------------------------------------------------------------------------------------


def test_a_backup_makes_for_an_orphan_the_step_that_all_had_staged_and_shows_it() -> None:
    """The primary is gone, and nobody says who is the next one."""
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    for rank in (0, 1):
        group.ask("a", push=StageStep(1, 1, rank), parcel=f"of {rank}")
    group.deliver("a")
    commit = CommitStep(1, 1, 2, 1.0)
    outcome = group.ask("b", commit=commit, pull=Need(step=1), notes=True, orphaned=True)
    made = ("step", 1, ((0, "of 0"), (1, "of 1")))
    answer = group.answer("b", outcome)
    assert (answer.pushed, answer.pulled) == ({}, {})
    assert answer.records[0].step == 1
    assert outcome.parcel == {0: (("since", 1, 0), made)}
    again = group.ask("b", commit=commit, pull=Need(step=1), orphaned=True)
    assert again.parcel == outcome.parcel, "it counts once"
    group.ask("a", commit=commit)
    group.deliver("a")
    assert group.log("a") == group.log("b") == [made], "if the primary lives after all, both have the same"


def test_an_orphan_does_not_wait_for_copies_on_the_host_that_is_lost() -> None:
    group = Group("ab", replicas("a", "b"))
    group.load("a")
    group.ask("a", push=ApplyLease(0, 0))
    assert not group.is_free("a", group.ask("a", pull=Need()))
    outcome = group.ask("a", pull=Need(), orphaned=True)
    assert group.answer("a", outcome).pulled == {}
    assert outcome.parcel[0][-1] == ("lease", 0, 0)


def test_who_is_being_brought_up_has_nothing_to_show_to_an_orphan() -> None:
    group = Group("abc", replicas("a", "b"))
    group.load("a")
    group.tell(replicas("a", "b", joining=[("c", 2)]))
    assert group.ask("c", pull=Need(), orphaned=True).answer.pulled == {0: Refusal.MOVED}
    assert group.ask("b", pull=Need(), orphaned=True).answer.pulled == {}
    empty = Group("a", replicas("a"))
    assert empty.ask("a", pull=Need(), orphaned=True).answer.pulled == {0: Refusal.EMPTY}
