"""What the driver chooses of events and directives: nothing that matters is left out."""

from __future__ import annotations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.control.leases.messages import LeaseGrant
from paceline.control.machines.choices import Choices
from paceline.control.machines.coordinator_events import (
    Connected,
    Count,
    Disconnected,
    Event,
    Remember,
    TellLeases,
    Tick,
)
from paceline.control.messages.members import Directive, Report, Verdict
from paceline.control.messages.plan import Phase, Plan, PlanStart
from paceline.control.messages.progress import StepRow
from paceline.control.shell.outbox import Outbox

NAMES = st.sampled_from("ABC")
EVENTS = st.one_of(
    st.builds(Connected, NAMES),
    st.builds(Disconnected, NAMES),
    st.just(Tick()),
    st.builds(lambda name: Report(name, 0, 1, Phase.ACTIVE), NAMES),
)


@settings(deadline=None)
@given(events=st.lists(EVENTS), connected=st.sets(NAMES))
def test_of_a_batch_only_what_is_superseded_is_left_out(events: list[Event], connected: set[str]) -> None:
    events = [
        msgspec.structs.replace(event, number=number) if isinstance(event, Report) else event
        for number, event in enumerate(events)
    ]
    chosen = Choices().merge(events, connected.__contains__)
    positions = [event.number for event in chosen if isinstance(event, Report)]
    assert positions == sorted(positions)
    for name in "ABC":
        said = [event for event in events if isinstance(event, Report) and event.member == name]
        assert [one for one in chosen if isinstance(one, Report) and one.member == name] == said[-1:]
        lost, kept = [
            [one for one in found if isinstance(one, Disconnected) and one.member == name] for found in (events, chosen)
        ]
        assert kept == ([] if name in connected else lost)
    others = [event for event in events if not isinstance(event, Report | Disconnected)]
    assert [event for event in chosen if not isinstance(event, Report | Disconnected)] == others


def directive(number: int, generation: int) -> Directive:
    plan = Plan(generation, PlanStart.FOUND, ()) if generation else None
    return Directive(1, number, "A", Verdict.KNOWN, plan=plan)


def test_a_plan_is_sent_once_on_a_connection_and_again_when_it_is_not_taken() -> None:
    choices = Choices(plan_again_s=2.0)
    assert choices.lighten(directive(1, 0), 0.0).plan is None
    assert choices.lighten(directive(2, 1), 0.0).plan is not None
    assert choices.lighten(directive(3, 1), 1.9).plan is None
    assert choices.lighten(directive(4, 1), 2.0).plan is not None
    assert choices.lighten(directive(5, 2), 2.1).plan is not None  # another one
    assert choices.lighten(directive(6, 1), 2.2).plan is not None  # the later one was withdrawn
    choices.merge([Connected("A")], lambda _: True)
    assert choices.lighten(directive(7, 1), 2.3).plan is not None  # what was on its way is lost


def test_leases_are_recorded_before_anybody_hears_that_they_need_not_be_said_again() -> None:
    rows = [StepRow(number, 1, 0, number, 1, 0.0, 0.0) for number in range(3)]
    choices = Choices()
    assert choices.rows_due([Count((rows[0],))]) == []
    assert choices.rows_due([Count((rows[1],)), Remember("leases", b"")]) == rows[:2]
    assert choices.rows_due([Remember("leases", b"")]) == []
    finished = TellLeases(LeaseGrant(1, 1, "A", 0, is_finished=True))
    assert choices.rows_due([Count((rows[2],)), finished]) == rows[2:]


def test_what_is_newer_is_sent_later_and_once() -> None:
    outbox = Outbox()
    for kind, body in [("directive", 1), ("plan", 2), ("directive", 3)]:
        outbox.put(kind, body)
    sent = []
    while outbox:
        sent.append(outbox.take())
    assert sent == [("plan", 2), ("directive", 3)]
