"""An errand: which server is asked for what, until every range is done."""

from __future__ import annotations

from paceline.placement.placement import Placement
from paceline.server.errand import Errand
from paceline.server.messages import ApplyLease, CommitStep, Need, RangeRecord, Refusal, ServerAnswer, StageStep
from paceline.wire.card import Card
from tests.server.keeper_cases import replicas


def placed(*primaries: str, version: int = 1) -> Placement:
    return Placement(version, 1, 1, (), tuple(replicas(primary) for primary in primaries))


def test_each_server_gets_one_request_for_all_its_ranges() -> None:
    errand = Errand(range(3), push=ApplyLease(0, 5), pull=Need())
    requests = errand.requests(placed("a", "b", "a", version=4))
    assert {server: request.ranges for server, request in requests.items()} == {"a": (0, 2), "b": (1,)}
    assert all(request.version == 4 and request.push == ApplyLease(0, 5) for request in requests.values())


def test_a_server_that_has_not_answered_is_not_asked_again() -> None:
    errand = Errand(range(2), push=ApplyLease(0, 0))
    errand.requests(placed("a", "b"))
    assert errand.requests(placed("a", "b")) == {}
    assert errand.under_way


def test_what_an_answer_has_of_ranges_that_moved_does_not_count() -> None:
    """It was exported, but by one who was not primary any more when it was answered."""
    old, new = (RangeRecord(True, False, 0, 0, prefix, (), 1) for prefix in (3, 5))
    errand = Errand(range(2), pull=Need(), exports=True)
    errand.requests(placed("a", "a"))
    assert errand.answered("a", ServerAnswer(2, pulled={1: Refusal.MOVED}, records={0: old, 1: old})) == (0,)
    errand.requests(placed("a", "b", version=2))
    assert errand.answered("b", ServerAnswer(2, records={1: new})) == (1,)
    assert errand.records == {0: old, 1: new}


def test_it_is_done_when_every_range_is() -> None:
    errand = Errand(range(2), push=ApplyLease(0, 0))
    errand.requests(placed("a", "b"))
    errand.answered("a", ServerAnswer(1))
    assert errand.left == {1}
    errand.answered("b", ServerAnswer(1))
    assert errand.is_done
    assert not errand.under_way


def test_only_the_ranges_that_were_refused_are_asked_for_again() -> None:
    errand = Errand(range(3), push=ApplyLease(0, 0))
    errand.requests(placed("a", "a", "a"))
    errand.answered("a", ServerAnswer(1, pushed={1: Refusal.EARLY}))
    assert errand.refusals == {1: Refusal.EARLY}
    assert errand.requests(placed("a", "a", "a"))["a"].ranges == (1,)
    errand.answered("a", ServerAnswer(1))
    assert errand.is_done
    assert errand.refusals == {}


def test_what_moved_is_asked_of_who_has_it_now() -> None:
    errand = Errand(range(2), push=ApplyLease(0, 0))
    errand.requests(placed("a", "a"))
    errand.answered("a", ServerAnswer(2, pushed={1: Refusal.MOVED}))
    assert errand.requests(placed("a", "b", version=2)).keys() == {"b"}


def test_a_range_under_way_is_not_asked_for_elsewhere() -> None:
    errand = Errand(range(1), push=ApplyLease(0, 0))
    errand.requests(placed("a"))
    assert errand.requests(placed("b", version=2)) == {}
    errand.lost("a")
    assert errand.requests(placed("b", version=2))["b"].ranges == (0,)


def test_a_broken_connection_leaves_everything_to_be_asked_again() -> None:
    errand = Errand(range(2), push=ApplyLease(0, 0), pull=Need())
    errand.requests(placed("a", "a"))
    errand.lost("a")
    assert not errand.under_way
    assert errand.requests(placed("a", "a"))["a"].ranges == (0, 1)


def test_what_was_pushed_is_not_pushed_again_when_only_the_pull_was_refused() -> None:
    errand = Errand(range(1), push=ApplyLease(0, 0), pull=Need(epoch=0, prefix=3))
    errand.requests(placed("a"))
    errand.answered("a", ServerAnswer(1, pulled={0: Refusal.EARLY}))
    request = errand.requests(placed("a"))["a"]
    assert request.push is None
    assert request.pull == Need(epoch=0, prefix=3)


def test_what_was_not_pushed_is_pulled_again_with_the_push() -> None:
    errand = Errand(range(1), commit=CommitStep(1, 1, 1, 1.0), pull=Need(step=1))
    errand.requests(placed("a"))
    errand.answered("a", ServerAnswer(1, pushed={0: Refusal.EARLY}))
    request = errand.requests(placed("a"))["a"]
    assert request.commit is not None
    assert request.pull is not None


def test_an_errand_without_a_push_only_pulls() -> None:
    errand = Errand(range(2), pull=Need())
    errand.requests(placed("a", "b"))
    errand.answered("a", ServerAnswer(1))
    errand.answered("b", ServerAnswer(1))
    assert errand.is_done


def test_a_restored_range_is_asked_again_until_somebody_has_loaded_it() -> None:
    errand = Errand(range(2), push=ApplyLease(0, 0), pull=Need())
    errand.requests(placed("a", "a"))
    errand.answered("a", ServerAnswer(2, pushed={1: Refusal.EMPTY}, pulled={1: Refusal.EMPTY}))
    assert errand.refusals == {1: Refusal.EMPTY}
    assert errand.requests(placed("a", "b", version=2))["b"].push == ApplyLease(0, 0)
    errand.answered("b", ServerAnswer(2))
    assert errand.is_done


def test_it_says_of_which_attempt_the_step_was_made_already() -> None:
    errand = Errand(range(2), push=StageStep(2, 1, 0))
    errand.requests(placed("a", "b"))
    errand.answered("a", ServerAnswer(1))
    assert errand.counted is None
    errand.answered("b", ServerAnswer(1, counted={1: CommitStep(1, 1, 3, 1.0)}))
    assert errand.counted == CommitStep(1, 1, 3, 1.0)


def test_an_orphan_does_not_give_up_a_server_whose_connection_broke_once() -> None:
    placement = Placement(1, 1, 1, (), (replicas("a", "b"),))
    errand = Errand(range(1), pull=Need(), exports=True, orphaned=True)
    for server in ("a", "b"):  # a is dead, and b lives
        assert list(errand.requests(placement)) == [server]
        errand.lost(server)
    assert list(errand.requests(placement)) == ["a"]
    errand.lost("a")
    assert errand.forlorn(placement) == set()
    assert list(errand.requests(placement)) == ["b"]
    errand.answered("b", ServerAnswer(1))
    assert errand.is_done


def test_an_orphan_asks_whoever_is_left_and_sees_what_nobody_has() -> None:
    placement = Placement(1, 1, 1, (), (replicas("a", "b"), replicas("b", "a"), replicas("a", "c")))
    errand = Errand(range(3), pull=Need(), exports=True, orphaned=True)
    requests = errand.requests(placement)
    assert {server: request.ranges for server, request in requests.items()} == {"a": (0, 2), "b": (1,)}
    assert all(request.orphaned for request in requests.values())
    errand.lost("a")
    errand.answered("b", ServerAnswer(1))
    assert errand.forlorn(placement) == set()
    requests = errand.requests(placement)
    assert {server: request.ranges for server, request in requests.items()} == {"b": (0,), "c": (2,)}
    errand.lost("c")
    errand.answered("b", ServerAnswer(1))
    assert (errand.left, errand.forlorn(placement)) == ({2}, set())
    for server in ("a", "c"):
        assert list(errand.requests(placement)) == [server], "each is asked once more"
        errand.lost(server)
    assert errand.left == errand.forlorn(placement) == {2}
    waiting = Errand(range(1), pull=Need())
    waiting.requests(placement)
    waiting.lost("a")
    assert waiting.forlorn(placement) == set(), "who has a coordinator waits for the next primary"


def test_an_orphan_finds_a_range_that_moved_in_a_placement_it_never_heard_of() -> None:
    cards = tuple(Card(name, "server", "", ("", 0), "", b"", False, ()) for name in "abc")
    placement = Placement(1, 1, 1, cards, (replicas("a", "b"),))
    errand = Errand(range(1), pull=Need(), exports=True, orphaned=True)
    errand.requests(placement)
    errand.lost("a")
    assert list(errand.requests(placement)) == ["b"]
    errand.answered("b", ServerAnswer(2, pulled={0: Refusal.MOVED}))
    assert list(errand.requests(placement)) == ["a"], "who should have it first"
    errand.lost("a")
    assert list(errand.requests(placement)) == ["c"]
    errand.answered("c", ServerAnswer(2, pulled={0: Refusal.MOVED}))
    assert errand.forlorn(placement) == {0}, "nobody is asked for ever"


def test_a_pull_that_waits_says_what_has_been_done_meanwhile() -> None:
    """A range that has lost updates waits for them, until it is told that they are done."""
    errand = Errand([0], pull=Need(epoch=1, prefix=3, settled=1))
    errand.settle(2)
    assert errand.requests(placed("a"))["a"].pull == Need(epoch=1, prefix=3, settled=2)
    errand.answered("a", ServerAnswer(1, pulled={0: Refusal.EARLY}))
    errand.settle(1)
    errand.settle(5)
    assert errand.requests(placed("a"))["a"].pull == Need(epoch=1, prefix=3, settled=5)


def test_a_pull_that_waits_for_no_lease_says_nothing_of_leases() -> None:
    """It may be of another epoch than those."""
    errand = Errand([0], pull=Need(step=4))
    errand.settle(7)
    assert errand.requests(placed("a"))["a"].pull == Need(step=4)
