"""Whether a newcomer fits the run, with a message that says what differs: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from paceline.control.machines.memory import CoordinatorMemory
from paceline.control.machines.roster import Fate, MemberRecord
from paceline.control.messages.members import Introduction


def check_fit(record: MemberRecord, memory: CoordinatorMemory) -> None:
    """A member whose model, data or versions differ from the run's would spoil it."""
    standing, mine = memory.standing, record.introduction
    if record.is_server:
        if text := difference_of_server(standing.facts or {}, mine):
            memory.end(record, Fate.REFUSED, text)
        return
    if standing.facts is None or (standing.founded == 0 and not memory.census.has_witness(record)):
        facts = {"facts": mine.facts, "parameters": mine.parameters, "ranges": mine.ranges, "leased": mine.leased}
        memory.keep(**facts, witness=record.member)
        return
    if text := difference(standing.facts, standing.parameters, mine):
        memory.end(record, Fate.REFUSED, text)
        _end_founding(record, text, memory)


def _end_founding(refused: MemberRecord, text: str, memory: CoordinatorMemory) -> None:
    """Which of two is the wrong one is not known before the run has begun: it must not begin with either. Later, the
    run is right and the newcomer is not."""
    standing = memory.standing
    witness = memory.census.records.get(standing.witness)
    if standing.current is not None or (standing.founded and (witness is None or witness.fate)):
        return
    if witness is None or witness.fate:
        witness = next(record for record in memory.census.alive if record is not refused)
    memory.fail(
        f"the workers do not fit together: {refused.describe()} differs from {witness.describe()}: {text}\n"
        f"likely cause: {likely_cause(text)}"
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
