"""Processes that start in milliseconds: forked from one that has imported what they need.

There is one such process for a whole test run, and whoever starts it decides what it has imported. So everybody asks
for the same.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

_PRELOAD = [
    "torch",
    "torch._dynamo",  # two seconds, in the first step of every worker that has not got it
    "paceline.cli.main",
    "paceline.c10d",
    "paceline.collective.meeting",
    "paceline.engine.launch",
    "paceline.server.member",
    "paceline.testing.crew",
    "paceline.testing.rehearsal",
    "paceline.train.session",
    "paceline.watch.display",
]


def fork_context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context
