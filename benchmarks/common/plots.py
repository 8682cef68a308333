"""Pictures, where matplotlib is installed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

REMEDY = "no picture: matplotlib is not installed (pip install 'paceline[bench]')"


def drawing() -> tuple[Any, Any] | None:
    """An empty figure and its axes; None, and a line, where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(REMEDY, flush=True)
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    return figure, figure.subplots()


def keep(figure: Any, axes: Any, path: Path | None) -> None:
    """In that file; drawn and thrown away without one, as in a quick run."""
    axes.legend()
    figure.savefig(path or io.BytesIO(), dpi=120)
