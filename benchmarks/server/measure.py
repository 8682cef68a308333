"""Rounds over all contenders, each with fresh processes, in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common import median, turns
from benchmarks.common.figures import tell
from benchmarks.server.crowd import crowd
from benchmarks.server.drivers import driver_of
from benchmarks.server.plan import DENSE, Plan


@dataclass
class Results:
    """By contender and measure, a figure for each round: iterations a second (dense), or million rows a second, of all
    workers together. `memcpy` is what copying the parameters once would allow, in iterations a second, by round."""

    figures: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    memcpy: list[float] = field(default_factory=list)


def run(plan: Plan) -> Results:
    results = Results()
    for name in plan.contenders:
        if reason := driver_of(name).obstacle():
            print(f"{name} is left out: {reason}", flush=True)
            results.left_out[name] = reason
    here = [name for name in plan.contenders if name not in results.left_out]
    for number in range(plan.num_rounds):
        if plan.work == DENSE:
            results.memcpy.append(_memcpy(plan.size))
        for name in turns(here, number):
            tell(number, name)
            with crowd(plan, name) as workers:
                for measure in plan.measures:
                    rate = workers.measure(measure)
                    figure = rate if plan.work == DENSE else rate * plan.batch / 1e6
                    results.figures.setdefault(name, {}).setdefault(measure, []).append(figure)
    return results


def _memcpy(size: int) -> float:
    source, target = np.ones(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return 1 / median(seconds)
