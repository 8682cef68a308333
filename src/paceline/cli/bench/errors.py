"""What ends a benchmark; the command prints the message as it stands."""

from __future__ import annotations

from paceline.errors import PacelineError


class BenchError(PacelineError):
    """The measurement cannot go on: a worker died, gave no answer or found a wrong sum."""


class BadInput(BenchError, ValueError):
    """An option that only the caller can repair; raised before any process is started."""
