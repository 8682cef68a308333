"""Where the processes of a run live, and who looks after them.

`base` is the contract of an engine, `local` the one for processes of this machine. `supervisor` decides, purely, what a
signal means and when all is over, `slot_group` who of its workers or servers is started again; `agent` is the loop that
acts on it. `running` puts a run together, `launch` makes one of a function.
"""

from paceline.engine.launch import launch

__all__ = ["launch"]
