"""What a member's machine is told, and what it wants done.

Events come from the training (`Begin`, `OperationDone`, `GroupBroke`, `Burden`), from the forming of groups
(`GroupFormed`, `GroupNotFormed`), from the transfer of state (`StateStaged`, `Caught`), from the coordinator
(`Directive`) and from whoever runs the process (`Leave`, `StopRun`, `Fail`). Actions go to the same places.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from paceline.control.messages.members import Directive, Introduction, Report, Survey, Verdict
from paceline.control.messages.plan import NOTHING, Plan
from paceline.placement.placement import Placement


class OperationKind(Enum):
    """The kinds of operations. A step is the only one before which members may join and leave."""

    STEP = "step"
    EVALUATE = "evaluate"
    DECIDE = "decide"
    END = "end"
    REFRESH = "refresh"  # the end of an epoch of leases


class MemberReady(NamedTuple):
    """Model and data are built."""

    introduction: Introduction
    checkpoint: int = NOTHING


class Looked(NamedTuple):
    """While this member waits for the state: the newest checkpoint is another one by now."""

    checkpoint: int


class Burden(NamedTuple):
    """The run would be faster without this member, as seen in a generation; "" for nobody."""

    member: str
    why: str = ""
    generation: int = 0


class Begin(NamedTuple):
    """The training wants to do its next operation."""

    kind: OperationKind


class OperationDone(NamedTuple):
    """The reduction of an operation is complete here. `held` are the generations that the ranks hold ready, as they
    wrote them into the header, `stopping` whether one of them asks for the end."""

    generation: int
    operation: int
    held: tuple[int, ...]
    stopping: bool = False


class GroupBroke(NamedTuple):
    """The group of a generation failed."""

    generation: int
    suspects: tuple[str, ...] = ()
    died: bool = False


class GroupFormed(NamedTuple):
    generation: int


class GroupNotFormed(NamedTuple):
    """The group of a generation could not be formed."""

    generation: int
    suspects: tuple[str, ...] = ()
    died: bool = False


class StateStaged(NamedTuple):
    """The whole state, as after operation `base`, has arrived and is intact."""

    generation: int
    base: int


class Caught(NamedTuple):
    """The result of the operation that the others are ahead by has arrived, with what was agreed in it."""

    generation: int
    operation: int
    stopping: bool = False


class Leave(NamedTuple):
    """This member is asked to go (a signal)."""


class StopRun(NamedTuple):
    """The whole run is asked to end (a signal to a run of one)."""


class Fail(NamedTuple):
    """The script raised."""

    cause: str


class Looping(NamedTuple):
    """The training does leases from now on, until its next operation."""


class Surveyed(NamedTuple):
    """A survey is made: whom this member cannot reach."""

    number: int
    unreachable: tuple[str, ...] = ()


Event = (
    Looping
    | Surveyed
    | MemberReady
    | Looked
    | Burden
    | Begin
    | OperationDone
    | GroupBroke
    | GroupFormed
    | GroupNotFormed
    | StateStaged
    | Caught
    | Leave
    | StopRun
    | Fail
    | Directive
)


class AdoptPlacement(NamedTuple):
    """Go by this placement of the parameters on servers from now on."""

    placement: Placement


class Reach(NamedTuple):
    """Find out whom of these members this one can reach."""

    survey: Survey


class SendReport(NamedTuple):
    report: Report


class FormGroup(NamedTuple):
    plan: Plan


class Drop(NamedTuple):
    """Give up the groups, complete or not, of all generations below this one."""

    below: int


class FoundRun(NamedTuple):
    """Make the state that the run starts from: new, or as after operation `base` from a checkpoint."""

    base: int


class Give(NamedTuple):
    """Send what a member lacks, through the group of this plan: the whole state, or the last result."""

    plan: Plan
    to: str
    whole: bool


class Take(NamedTuple):
    plan: Plan
    source: str
    whole: bool


class SwapState(NamedTuple):
    """Let the staged state become the state."""

    base: int


class DoOperation(NamedTuple):
    """Do this operation in the group of this plan."""

    plan: Plan
    operation: int
    kind: OperationKind


class ApplyOperation(NamedTuple):
    """The operation counts. `settled` is the last one that nothing can undo."""

    plan: Plan
    operation: int
    settled: int


class Exit(NamedTuple):
    """The process may end."""

    verdict: Verdict
    reason: str


Action = (
    SendReport
    | AdoptPlacement
    | Reach
    | FormGroup
    | Drop
    | FoundRun
    | Give
    | Take
    | SwapState
    | DoOperation
    | ApplyOperation
    | Exit
)
