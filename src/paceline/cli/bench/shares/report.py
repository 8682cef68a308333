"""Tables and the JSON record of `paceline bench shares`."""

from __future__ import annotations

import statistics
from typing import Any

from rich.table import Table

from paceline.cli.bench.shares.measure import SETTLED, Results
from paceline.cli.bench.shares.plan import ALONE, AUTO, CNN, EQUAL, Plan


def tables(plan: Plan, results: Results) -> list[Table]:
    how = "a quota of the kernel" if results.by_quota else "sleep" if plan.work == CNN else "timed work"
    speeds = " : ".join(f"{speed:g}" for speed in plan.speeds)
    title = f"workers with speeds {speeds} by {how}, global batch {plan.total}, medians of {plan.num_rounds} rounds"
    table = Table("", "samples/s", "of the sum of each alone (lowest-highest)", title=title)
    sums = [sum(rates) for rates in results.alone]
    table.add_row(f"sum of {ALONE}", f"{statistics.median(sums):,.0f}", "1")
    for contender, parts in _parts(results).items():
        table.add_row(contender, f"{statistics.median(results.together[contender]):,.0f}", _spread(parts))
    if results.changing:
        table.add_row(f"{AUTO}, speeds change every {plan.change_every} steps", "", _spread(results.changing))
    return [table, _notes(plan, results)]


def record(plan: Plan, results: Results) -> dict[str, Any]:
    return {
        "work": plan.work,
        "speeds": plan.speeds,
        "global_batch": plan.total,
        "by_quota": results.by_quota,
        "samples_per_s_alone": results.alone,
        "samples_per_s": results.together,
        "of_sum_alone": {contender: statistics.median(parts) for contender, parts in _parts(results).items()},
        "auto_of_equal_shares": _auto_of_equal(results),
        "shares": results.shares,
        "late_changes": results.late_changes,
        "change_every": plan.change_every,
        "of_sum_alone_while_speeds_change": results.changing,
        "steps_before_relief": results.relief,
    }


def _parts(results: Results) -> dict[str, list[float]]:
    """What each contender did, as a part of the sum of all alone in the same round."""
    return {
        contender: [rate / sum(alone) for rate, alone in zip(rates, results.alone, strict=True)]
        for contender, rates in results.together.items()
    }


def _auto_of_equal(results: Results) -> float:
    pairs = zip(results.together[AUTO], results.together[EQUAL], strict=True)
    return statistics.median(auto / equal for auto, equal in pairs)


def _notes(plan: Plan, results: Results) -> Table:
    notes = Table.grid()
    listed = ", ".join(":".join(map(str, shares)) for shares in results.shares)
    notes.add_row(f"shares at the end of each round: {listed}")
    notes.add_row(f"changes of shares after the first {SETTLED} steps, by round: {results.late_changes}")
    notes.add_row(f"{AUTO} is {_auto_of_equal(results):.3f} times as fast as with equal shares")
    if results.relief:
        usual, most, times = statistics.median(results.relief), max(results.relief), len(results.relief)
        notes.add_row(
            f"steps before the share of a worker that slowed down follows: {usual:g}, at most {most} of {times}"
        )
    return notes


def _spread(parts: list[float]) -> str:
    return f"{statistics.median(parts):.3f} ({min(parts):.3f}-{max(parts):.3f})"
