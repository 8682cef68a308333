"""Where the processes of a run live, and who looks after them.

`base` is the contract of an engine, `local` the one for processes of this machine. `supervisor` decides, purely, who is
started again and what a signal means; `agent` is the loop that acts on it. `running` puts a run together, `launch`
makes one of a function.
"""

from paceline.engine.launch import LaunchFailed, launch

__all__ = ["LaunchFailed", "launch"]
