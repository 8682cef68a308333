"""`paceline bench`: what a script, this machine, and the links between yours, can do. A folder for each command.

steps      where a step of a script goes: `paceline bench train.py`
allreduce  the collectives on this host, beside torch's Gloo
links      latency and bandwidth between hosts, and what `auto` would choose there
app        what the commands have in common; `machine` describes the host

A further command is a folder beside these and a line in cli/main.py. How Paceline compares with other systems
is measured by benchmarks/, which is not part of the wheel.
"""
