"""Whether a newcomer fits the run: pure comparison, with a message that says what differs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.control.messages import Introduction


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
