"""The beginning of a run, and of a coordinator that has forgotten one: pure rules.

Whether a newcomer fits the run, with a message that says what differs; whether somebody is still to be waited for; and
what is to be made of members that know more than their coordinator, because its journal was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from paceline.control.machines.coordinator_events import CoordinatorState
from paceline.control.machines.roster import MemberRecord
from paceline.control.messages.members import Introduction, Report
from paceline.control.messages.plan import NOTHING, Phase

GONE_ON = "the run had gone on without it"  # why one that holds a state is evicted


class Forgotten(NamedTuple):
    """From where a coordinator goes on that has forgotten at least this: its next term, and the newest generation."""

    term: int
    newest: int


def forgotten(report: Report, standing: CoordinatorState, *, is_known: bool) -> Forgotten | None:
    """What a report proves to be forgotten. A generation is remembered before anybody hears of it, and so is a member;
    who was told of others has heard them from a coordinator whose journal is lost."""
    has_introduced_itself = report.introduction is None and report.phase is not Phase.BUILDING and report.term > 0
    is_proof = has_introduced_itself and not is_known
    if report.plan <= standing.newest and report.term <= standing.term and not is_proof:
        return None
    term = standing.term if report.term < standing.term else report.term + 1
    return Forgotten(term, max(report.plan, standing.newest))


def holds(report: Report) -> bool:
    """Whether a member holds the training state. Those who left in order do not: the others may have gone on."""
    return report.applied > NOTHING and not report.left and report.phase in (Phase.ACTIVE, Phase.ENDED)


def holders(alive: Iterable[MemberRecord]) -> list[MemberRecord]:
    """Who lives and holds the state of a run that no plan speaks of: it must not be founded anew without them."""
    return [record for record in alive if holds(record.report)]


def has_survivor(ready: Iterable[MemberRecord]) -> bool:
    """Whether one of those that are ready had a seat before. A run that has begun does not wait for who may come: they
    join later."""
    return any(record.report.plan > 0 for record in ready)


def unused_servers(facts: Mapping[str, str]) -> str:
    """What to say of servers in a run that keeps nothing on any."""
    strategy = facts.get("the strategy", "").partition(",")[0]
    named = f" (strategy={strategy!r})" if strategy else ""
    return (
        f"the servers of this run are not used: its workers keep nothing on them{named}; make the session with "
        "strategy='server' or 'hybrid', or leave out --servers"
    )


_CAUSES = {
    "fingerprint": "is the data random? seed it before it is made; is it read from files? give all machines the same",
    "length": "is the data random, or cut by the rank? give all workers the same data set, they divide it themselves",
    "version": "install the same version on all machines",
}
_MODEL_CAUSE = "does the script build its model from something that differs, such as an argument or a random number?"


def likely_cause(difference: str) -> str:
    """Where to look first."""
    if difference.startswith("parameter "):
        return _MODEL_CAUSE
    causes = [cause for word, cause in _CAUSES.items() if word in difference.partition(" is ")[0]]
    return causes[0] if causes else "is the script, or are its arguments, another on one of them?"


def difference(facts: Mapping[str, str], parameters: Sequence[str], introduction: Introduction) -> str:
    """The first thing in which a member differs from the run; empty if there is none."""
    for name in sorted(facts.keys() | introduction.facts.keys()):
        ours, theirs = facts.get(name, "nothing"), introduction.facts.get(name, "nothing")
        if ours != theirs:
            return f"{name} is {theirs} here but {ours} on the other members; all members must run the same"
    for number, (ours, theirs) in enumerate(zip(parameters, introduction.parameters, strict=False)):
        if ours != theirs:
            return f"parameter {number} is {theirs!r} here but {ours!r} on the other members; build the same model"
    if len(parameters) != len(introduction.parameters):
        longer = max(parameters, introduction.parameters, key=len)
        first = longer[min(len(parameters), len(introduction.parameters))]
        where = "here" if longer is introduction.parameters else "on the other members"
        return f"parameter {first!r} is only {where}; build the same model on all members"
    return ""


def difference_of_server(facts: Mapping[str, str], introduction: Introduction) -> str:
    """The same for a server, which knows nothing of the script; `facts` are empty before the first worker came."""
    for name, theirs in introduction.facts.items():
        ours = facts.get(name, theirs)
        if ours != theirs:
            return f"{name} is {theirs} on this server but {ours} on the workers; all members must run the same"
    return ""
