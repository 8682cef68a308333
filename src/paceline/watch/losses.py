"""What a run has lost for good, from its events: the last copy of ranges of parameters, with updates that no checkpoint
and no worker has; or its last state, where no checkpoint of it could be written."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from paceline.control.journal.reader import EventRow, PlanRow, RunReader
from paceline.control.messages import losses
from paceline.control.messages.plan import PlanStart
from paceline.watch import words
from paceline.watch.look import Figures


class Lost(NamedTuple):
    """`samples` is -1 where the run did not say how long its data are. Without updates it is what optimizers kept."""

    updates: int
    samples: int

    def __str__(self) -> str:
        if not self.updates:
            return (
                "what optimizers kept of parameters whose last copy died with a server; no update of the model itself"
            )
        samples = f", {words.count(self.samples, 'sample')}," if self.samples >= 0 else ""
        return (
            f"{words.count(self.updates, 'update')}{samples} of parameters whose last copy died with a server; "
            "with more --replicas, more of them must die at a time"
        )


def find_lost(reader: RunReader) -> Lost | None:
    """None if nothing is lost."""
    events = reader.events()
    told = [event for event in events if event.kind == losses.KIND]
    if not told:
        return None
    plans, operations = reader.plans(), [step.operation for step in reader.steps()]
    kept = [(event, _standing(event, events, plans, operations)) for event in told]
    numbers = {number for event, last in kept for number in losses.numbers_in(event.text) if last < 0 or number <= last}
    if not numbers and all(last >= 0 for _, last in kept):
        return None  # the run went back to a checkpoint from before, and did it all again
    sizes = Figures.of(reader.status())
    is_known = sizes.dataset_length and sizes.global_batch
    samples = losses.num_samples(numbers, sizes.dataset_length, sizes.global_batch) if is_known else -1
    return Lost(len(numbers), samples)


def find_unsaved(reader: RunReader) -> str:
    """Why the last state of the run is in no checkpoint, in words; empty if it is in one, or if the run went on."""
    told = reader.last_event(losses.NOT_SAVED)
    if told is None or any(plan.start == PlanStart.FOUND.value and plan.time > told.time for plan in reader.plans()):
        return ""
    return told.text


class Shortfall(NamedTuple):
    """What a run lacks, in words; empty for nothing: updates that are `lost` for good, its last state if that is
    `unsaved`, and the record of all that, if it is `unrecorded`."""

    lost: str = ""
    unsaved: str = ""
    unrecorded: str = ""

    @property
    def lines(self) -> list[str]:
        found = {"lost": self.lost, "not saved": self.unsaved, "no record": self.unrecorded}
        return [f"{what}: {text}" for what, text in found.items() if text]


def find_shortfall(reader: RunReader) -> Shortfall:
    return Shortfall(str(find_lost(reader) or ""), find_unsaved(reader))


def _standing(told: EventRow, events: list[EventRow], plans: list[PlanRow], operations: list[int]) -> int:
    """The last update that was not done again since, because the run was founded anew; -1 if it was not. By the order
    of events, not by their times: clocks jump."""
    later = {event.text for event in events if event.kind == "plan" and event.id > told.id}
    founded = [plan for plan in plans if plan.start == PlanStart.FOUND.value]
    bases = [plan.base for plan in founded if any(text.startswith(f"generation {plan.generation} ") for text in later)]
    return bisect_right(operations, min(bases)) if bases else -1
