"""Draws a run as an SVG: the loss over time, and who took part when. Used by `elastic.py --picture FILE`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from paceline.control.journal.reader import PlanRow, StepRecord

WIDTH, LEFT, RIGHT = 860.0, 70.0, 20.0
CHART_TOP, CHART_HEIGHT, LANE_HEIGHT = 40.0, 200.0, 26.0
COLOURS = ("#2f6fde", "#18a07a", "#d9822b", "#8e5bd0", "#c24a72")
MARK = "#c0392b"


def draw(steps: Sequence[StepRecord], plans: Sequence[PlanRow], killed_at: float) -> str:
    """One picture of what the workers of these steps did; `killed_at` is when one of them was killed."""
    times = {step.generation: [one.time for one in steps if one.generation == step.generation] for step in steps}
    begin, end = steps[0].time - steps[0].seconds, steps[-1].time

    def x(time: float) -> float:
        return LEFT + (time - begin) / (end - begin) * (WIDTH - LEFT - RIGHT)

    lanes = _lanes([plan for plan in plans if plan.generation in times], times, killed_at)
    bottom = CHART_TOP + CHART_HEIGHT
    height = bottom + 50.0 + LANE_HEIGHT * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" font-family="sans-serif" '
        f'font-size="13"><rect width="100%" height="100%" fill="white"/>',
        *_curve(steps, x),
        *_mark(x(killed_at), height, "kill -9"),
        _text(LEFT, bottom + 20.0, f"{end - begin:.0f} s of training: a bar for each worker"),
    ]
    starts = sorted(start for start, _ in lanes)
    if starts[-1] > killed_at:
        parts += _mark(x(starts[-1]), height, "a worker joins")
    for number, (start, stop) in enumerate(lanes):
        top = bottom + 34.0 + number * LANE_HEIGHT
        colour = COLOURS[number % len(COLOURS)]
        parts.append(
            f'<rect x="{x(start):.1f}" y="{top}" width="{x(stop) - x(start):.1f}" height="16" fill="{colour}"/>'
        )
        parts.append(_text(8.0, top + 13.0, f"worker {number}"))
    return "\n".join([*parts, "</svg>", ""])


def _lanes(plans: Sequence[PlanRow], times: dict[int, list[float]], killed_at: float) -> list[tuple[float, float]]:
    """From when to when each worker took part, in the order of coming."""
    found: dict[str, tuple[float, float]] = {}
    for plan in plans:
        first, last = times[plan.generation][0], times[plan.generation][-1]
        for member in plan.members:
            found[member] = (found.get(member, (first, 0.0))[0], last)
    ends = {last for _, last in found.values()}
    return [(first, killed_at if last < max(ends) else last) for first, last in found.values()]


def _curve(steps: Sequence[StepRecord], place: Callable[[float], float]) -> list[str]:
    losses = [step.loss if step.loss is not None else 0.0 for step in steps]
    smooth = list(itertools.accumulate(losses, lambda mean, loss: 0.8 * mean + 0.2 * loss))
    top, low = max(smooth), min(0.0, *smooth)

    def y(loss: float) -> float:
        return CHART_TOP + (1.0 - (loss - low) / (top - low or 1.0)) * CHART_HEIGHT

    points = " ".join(f"{place(step.time):.1f},{y(loss):.1f}" for step, loss in zip(steps, smooth, strict=True))
    axis = f'<path d="M{LEFT} {CHART_TOP}V{CHART_TOP + CHART_HEIGHT}H{WIDTH - RIGHT}" fill="none" stroke="#999"/>'
    labels = [_text(8.0, y(top) + 5.0, f"{top:.2f}"), _text(8.0, y(low), f"{low:.2f}"), _text(8.0, 24.0, "loss")]
    return [axis, *labels, f'<polyline points="{points}" fill="none" stroke="#333" stroke-width="1.8"/>']


def _mark(place: float, height: float, words: str) -> list[str]:
    line = f'<path d="M{place:.1f} 30V{height - 6}" stroke="{MARK}" stroke-dasharray="4 3"/>'
    return [line, f'<text x="{place:.1f}" y="22" text-anchor="middle" fill="{MARK}">{words}</text>']


def _text(left: float, top: float, words: str) -> str:
    return f'<text x="{left}" y="{top}" fill="#444">{words}</text>'
