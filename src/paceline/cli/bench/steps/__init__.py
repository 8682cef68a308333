"""`paceline bench SCRIPT`: where a step of a script goes, on workers of this machine.

command.py   runs the script, as `paceline run` does, until enough steps were recorded (`watch/spans.py`)
analysis.py  what each worker did in a step, and whom it waited for (pure)
findings.py  what the limit is, and what can be done about it (pure)
report.py    the table, and one step of all workers as text or SVG (pure)
"""
