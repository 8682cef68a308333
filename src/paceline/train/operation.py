"""An entry of the run's single numbered sequence, as the training thread does it.

    attempt(place)   do it with the members of this plan, up to and including the header, of which all see all rows
    prepare(plan)    it is done again in this plan, whose group is being formed meanwhile
    commit(place)    the member's machine says that it counts: change the state, and return the outcome

Promises: `attempt` changes nothing that counts, and may be called again with another place. `commit` meets no other
worker. Where another worker was faster, neither this worker's result nor its `commit` is used (`TrainingLedger.catch`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from paceline.collective import Group
from paceline.control.machines.member_events import OperationKind
from paceline.control.messages.plan import Plan
from paceline.errors import Disagreement
from paceline.strategy.base import Flag, Notice
from paceline.strategy.header import HeaderRows, exchange_text

_KINDS = list(OperationKind)
_KIND_BIT = 8  # in the flags of a header, of which the session owns those below 16

ALIKE = "the script must call step, evaluate, score, should_stop and end in the same order on all workers"


class Place(NamedTuple):
    """Where an operation is attempted."""

    plan: Plan
    rank: int
    group: Group | None
    operation: int
    kind: OperationKind

    @property
    def size(self) -> int:
        return len(self.plan.seats)

    def notice(self, held: int, *, stop_asked: bool) -> Notice:
        """What a worker has to say: the generation that it is ready to switch to, and whether the run is to end."""
        flags = (int(Flag.STOP) if stop_asked else 0) | _KINDS.index(self.kind) << _KIND_BIT
        return Notice(self.operation, held, flags)

    def checked(self, rows: HeaderRows) -> HeaderRows:
        """`Disagreement` if workers do different operations: the headers of some kinds look alike."""
        if len({row.flags >> _KIND_BIT & 7 for row in rows}) > 1:
            kinds = [_KINDS[row.flags >> _KIND_BIT & 7].value for row in rows]
            each = ", ".join(f"{kind} on {rows.name_of(rank)}" for rank, kind in enumerate(kinds))
            raise Disagreement(f"{self} is {each}; {ALIKE}")
        return rows

    def all_texts(self, text: bytes) -> list[bytes]:
        """What every worker says, by rank."""
        return exchange_text(self.group, text) if self.group is not None else [text]

    def __str__(self) -> str:
        return f"operation {self.operation} (here {self.kind.value}, generation {self.plan.generation})"


class TrainingOperation(Protocol):
    @property
    def kind(self) -> OperationKind: ...

    def attempt(self, place: Place) -> HeaderRows: ...

    def prepare(self, plan: Plan) -> None: ...

    def commit(self, place: Place) -> Any: ...
