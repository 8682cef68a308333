"""What a session counts: where it stands in the data, what it has decided, and results that newcomers need."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from paceline.balance import Balance
from paceline.data.cursor import Cursor

Mode = Literal["min", "max"]


class Book(msgspec.Struct):
    """The same on all workers after the same operation. `outside` are results of operations between the loops over
    epochs: a worker that starts later runs the script from its top, and gets these where the others computed them."""

    cursor: Cursor = Cursor(0, 0)
    steps: int = 0  # where leases are done, the highest that this worker knows of
    steps_before: int = 0  # the epoch that the cursor is in
    skipped: int = 0
    loss: float = math.nan
    best: float | None = None
    num_worse: int = 0
    unkept_best: float | None = None  # the score of the model as it is, the less the better, until a checkpoint has it
    outside: list[Any] = []
    balance: Balance = Balance()
    num_scheduled: int = 0  # leases of the epoch for which schedules were moved on
    is_stopped: bool = False  # the loop over epochs was to be left, and has not gone on since
    settling: str = ""  # how the last update was decided, where servers may not have made it yet

    def copy(self) -> Book:
        """As it is now."""
        return msgspec.structs.replace(self, outside=list(self.outside))

    def to_tree(self) -> dict[str, Any]:
        tree = {name: getattr(self, name) for name in self.__struct_fields__}
        return {
            **tree,
            "cursor": (self.cursor.epoch, self.cursor.position),
            "outside": list(self.outside),
            "balance": msgspec.to_builtins(self.balance),
        }

    @classmethod
    def from_tree(cls, tree: dict[str, Any]) -> Book:
        balance = msgspec.convert(tree.get("balance", {}), Balance)  # older checkpoints have none
        return cls(**{**tree, "cursor": Cursor(*tree["cursor"]), "balance": balance})

    def begin_epoch(self, epoch: int) -> None:
        self.cursor, self.num_scheduled, self.steps_before = Cursor(epoch, 0), 0, self.steps

    def num_steps_of_epoch(self, whole: int, max_steps: int | None) -> int:
        """How many steps this epoch has, of `whole` at most, where the loop over epochs ends after `max_steps`."""
        return whole if max_steps is None else min(whole, max(0, max_steps - self.steps_before))

    def judge(self, score: float, mode: Mode, min_delta: float) -> bool:
        """Whether a score is the best so far; counts those that are not."""
        if math.isnan(score):
            is_better = False
        elif self.best is None:
            is_better = True
        else:
            gain = self.best - score if mode == "min" else score - self.best
            is_better = gain > min_delta
        if is_better:
            self.best = score
            self.unkept_best = score if mode == "min" else -score
            self.num_worse = 0
        else:
            self.num_worse += 1
        return is_better
