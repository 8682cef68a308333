"""What `paceline bench SCRIPT` prints: a table, one step of all workers as a picture, and what the limit is."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.cli.bench.steps.analysis import WAITING, StepAnalysis, WorkerStep
from paceline.cli.bench.steps.findings import StepFinding

# By kind: a letter for the picture in text, a colour, and what it is, in the order of a step.
KINDS = {
    "data": ("d", "#4e79a7", "batch"),
    "leases": ("l", "#c7c7c7", "waiting for a lease"),
    "forward": ("f", "#59a14f", "forward"),
    "backward": ("b", "#2f6e2a", "backward"),
    "copy": ("c", "#b6992d", "copying gradients"),
    "statistics": ("n", "#d37295", "statistics of BatchNorm"),
    WAITING: (".", "#d9d9d9", "waiting for others"),
    "reduce": ("r", "#f28e2b", "reducing gradients"),
    "header": ("h", "#ffbe7d", "agreeing on the step"),
    "servers": ("s", "#b07aa1", "servers"),
    "optimizer": ("o", "#e15759", "optimizer"),
    "session": ("p", "#76b7b2", "Paceline itself"),
    "script": ("x", "#9c755f", "the body of the loop"),
}
_WIDTH = 100  # characters of a step
_SVG_WIDTH, _ROW, _MARGIN = 900, 34, 90


def table(analysis: StepAnalysis) -> Table:
    found = Table(title=f"ms of a step (mean of {analysis.num_steps}), and its parts", title_justify="left")
    found.add_column("")
    for times in analysis.workers:
        found.add_column(f"worker {times.worker}", justify="right")
    for kind, (letter, _, words) in KINDS.items():
        if any(kind in times.by_kind for times in analysis.workers):
            cells = (_cell(times.by_kind.get(kind, 0.0), times.step_s) for times in analysis.workers)
            found.add_row(f"{letter} {words}", *cells)
        for other in _awaited(analysis) if kind == WAITING else ():
            cells = (_cell(times.awaited.get(other, 0.0), times.step_s) for times in analysis.workers)
            found.add_row(f"    of it for worker {other}", *cells, style="dim")
    found.add_section()
    found.add_row("the whole step", *(f"{times.step_s * 1e3:.3f}" for times in analysis.workers))
    return found


def _awaited(analysis: StepAnalysis) -> list[int]:
    return sorted({other for times in analysis.workers for other in times.awaited})


def _cell(seconds: float, step_s: float) -> str:
    return f"{seconds * 1e3:.3f} {seconds / step_s:4.0%}" if seconds else ""


# -- one step of all workers -------------------------------------------------------------------------------------------


def picture(steps: Sequence[WorkerStep]) -> Text:
    """A line for each worker, a letter for each slice of time: of what took most of it."""
    begin, end = _extent(steps)
    drawn = Text(f"one step of all workers, {(end - begin) / 1e6:.3f} ms from left to right\n")
    for step in steps:
        drawn.append(f"worker {step.worker} ")
        for place in range(_WIDTH):
            low, high = (begin + (end - begin) * edge // _WIDTH for edge in (place, place + 1))
            letter, colour, _ = KINDS.get(_most(step, low, high), (" ", "default", ""))
            drawn.append(letter, style=f"on {colour}" if letter != " " else "")
        drawn.append("\n")
    return drawn


def _most(step: WorkerStep, low: int, high: int) -> str:
    shares: dict[str, int] = {}
    for part in step.parts:
        if (shared := min(part.stop, high) - max(part.start, low)) > 0:
            shares[part.kind] = shares.get(part.kind, 0) + shared
    return max(shares, key=lambda kind: shares[kind]) if shares else ""


def svg(steps: Sequence[WorkerStep]) -> str:
    """The same to scale, as a picture of its own."""
    begin, end = _extent(steps)
    scale = _SVG_WIDTH / (end - begin)
    present = [kind for kind in KINDS if any(part.kind == kind for step in steps for part in step.parts)]
    width, legend_at = _SVG_WIDTH + _MARGIN + 10, 30 + _ROW * len(steps) + 20
    height = legend_at + 20 * len(present) + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{_MARGIN}" y="18">one step of all workers, {(end - begin) / 1e6:.3f} ms</text>',
    ]
    for row, step in enumerate(steps):
        top = 30 + _ROW * row
        lines.append(f'<text x="8" y="{top + 19}">worker {step.worker}</text>')
        for part in step.parts:
            _, colour, words = KINDS[part.kind]
            awaited = f" (worker {part.awaited})" if part.awaited >= 0 else ""
            lines.append(
                f'<rect x="{_MARGIN + (part.start - begin) * scale:.2f}" y="{top}" '
                f'width="{part.duration * scale:.2f}" height="{_ROW - 8}" fill="{colour}">'
                f"<title>{html.escape(words)}{awaited}: {part.duration / 1e6:.3f} ms</title></rect>"
            )
    for row, kind in enumerate(present):
        _, colour, words = KINDS[kind]
        top = legend_at + 20 * row
        lines.append(f'<rect x="{_MARGIN}" y="{top}" width="14" height="14" fill="{colour}"/>')
        lines.append(f'<text x="{_MARGIN + 22}" y="{top + 12}">{html.escape(words)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _extent(steps: Sequence[WorkerStep]) -> tuple[int, int]:
    return min(step.parts[0].start for step in steps), max(step.parts[-1].stop for step in steps)


# -- words and figures -------------------------------------------------------------------------------------------------


def lines(findings: Sequence[StepFinding]) -> list[str]:
    if not findings:
        return ["nothing stands out: no part takes much more than the others"]
    return [f"the limit: {findings[0].text}", *(f"also: {finding.text}" for finding in findings[1:])]


def record(analysis: StepAnalysis, findings: Sequence[StepFinding]) -> dict[str, Any]:
    return {
        "facts": dict(analysis.facts),
        "num_steps": analysis.num_steps,
        "workers": [
            {
                "worker": times.worker,
                "step_s": times.step_s,
                "parts_s": times.by_kind,
                "waiting_for_s": {str(other): seconds for other, seconds in times.awaited.items()},
            }
            for times in analysis.workers
        ],
        "example": [
            {"worker": step.worker, "step": step.number, "parts": [list(part) for part in step.parts]}
            for step in analysis.example
        ],
        "findings": [finding._asdict() for finding in findings],
    }
