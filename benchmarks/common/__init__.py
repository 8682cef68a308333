"""What all benchmarks share.

benchmark.py  options, the quick form, the end: tables, targets, JSON with the machine's description
targets.py    what a figure must come to, beside what
figures.py    contenders in turns; medians, ratios within rounds, and how they are written
models.py     networks that several benchmarks train
slowness.py   processes and machines made slower
fleet.py      a run over several hosts, by the commands that a person types
coordinating.py  a coordinator without an agent
plots.py      lines in a picture, where matplotlib is installed
"""

from __future__ import annotations

from benchmarks.common.benchmark import RESULTS, SKIPPED, Benchmark, Found, Option, Skipped
from benchmarks.common.figures import interleave, median, ratio, spread, turns, with_worst
from benchmarks.common.targets import Target

__all__ = [
    "RESULTS",
    "SKIPPED",
    "Benchmark",
    "Found",
    "Option",
    "Skipped",
    "Target",
    "interleave",
    "median",
    "ratio",
    "spread",
    "turns",
    "with_worst",
]
