"""What `fit` tells while it trains, and to whom: derive from `Callback`, or use one of these.

class Print(paceline.callbacks.Callback):
    def on_step(self, step: paceline.callbacks.StepInfo) -> None:
        print(step.step, step.loss)

paceline.fit(paceline.Task(..., callbacks=[Print()]))
"""

from paceline.train.callbacks import Callback, EpochInfo, JsonLines, PrintProgress, RunInfo, StepInfo, ValidationInfo

__all__ = ["Callback", "EpochInfo", "JsonLines", "PrintProgress", "RunInfo", "StepInfo", "ValidationInfo"]
