"""What `fit` tells while it trains: derive from `Callback`, or use one of those here.

    class Say(paceline.callbacks.Callback):
        def on_step(self, info):
            print(info.step, info.loss)

A callback is called

- on the main worker only, or on all workers with `workers = "all"`. If the main worker dies or leaves, the next one
  calls `on_start` first, and goes on from there. Each worker has its own object of the callback;
- for settled steps only. A step is settled when the next operation is complete, so `on_step` comes one operation late,
  and the last one comes at the end. When the main worker dies, both main workers may tell of one step, or neither;
- on the training thread, between two operations: the other workers wait for a callback that takes long.

An exception in a callback ends this worker, and `fit` raises it. A callback on the main worker alone must change
neither the model nor `session.state`: the workers would differ.
"""

from paceline.train.callbacks import Callback, EpochInfo, JsonLines, PrintProgress, RunInfo, StepInfo, ValidationInfo

__all__ = ["Callback", "EpochInfo", "JsonLines", "PrintProgress", "RunInfo", "StepInfo", "ValidationInfo"]
