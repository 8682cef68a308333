"""Why a run failed, as its last lines say it."""

from __future__ import annotations

from paceline.control.machines.census import Census
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.members import Introduction
from paceline.wire.card import Card


def add(census: Census, member: str, agent: str, fate: Fate | None, reason: str) -> None:
    card = Card(member, "worker", "host", ("127.0.0.1", 1), "name", b"", False, ())
    record = MemberRecord(Introduction(card, 1, "here", agent, {}), 0.0)
    record.fate, record.reason = fate, reason
    census.records[member] = record


def test_what_failed_in_an_earlier_session_is_not_why_this_one_did() -> None:
    census = Census()
    add(census, "a", "earlier", Fate.FAILED, "an old error")
    add(census, "b", "earlier", Fate.DEAD, "was killed")
    assert census.root_cause("exited with code 2", {"now"}) == "no worker came up; the last process exited with code 2"
    assert census.root_cause("", {"now"}) == "there are no workers"
    add(census, "c", "now", Fate.DEAD, "was killed by signal 9")
    assert census.root_cause("", {"now"}).endswith(": was killed by signal 9")
    add(census, "d", "now", Fate.FAILED, "a new error")
    assert census.root_cause("", {"now"}).endswith(":\na new error")
    assert census.root_cause("", {"earlier", "now"}).endswith(":\nan old error")


def test_who_says_why_it_ended_comes_before_who_met_a_difference() -> None:
    census = Census()
    add(census, "a", "now", Fate.FAILED, "paceline.errors.Mismatch: step here, end there")
    assert census.root_cause("", {"now"}).endswith("step here, end there")
    add(census, "b", "now", Fate.FAILED, "the script ended on this worker")
    assert census.root_cause("", {"now"}).endswith(":\nthe script ended on this worker")
