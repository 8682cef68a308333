"""Errors of a training.

PacelineError
└── TrainingError
    ├── NonFiniteGradient   a gradient is not finite, and the session was told to stop then
    ├── Refused             this worker does not fit the run: another model, other data, another version
    ├── Evicted             the run goes on without this worker
    ├── EndedAlone          the script ended here, and the other workers went on
    ├── Orphaned            the coordinator is gone, and nobody can say how to go on
    └── RunFailed           the run failed elsewhere; the message is the root cause
"""

from __future__ import annotations

from paceline.errors import PacelineError


class TrainingError(PacelineError):
    """A training cannot go on in this process."""


class NonFiniteGradient(TrainingError):
    """A gradient is not finite; the step was not committed."""


class Refused(TrainingError):
    """This worker does not fit the run."""


class Evicted(TrainingError):
    """The run goes on without this worker, which was silent for too long or could not be reached."""


class EndedAlone(TrainingError):
    """The script ended on this worker, in order, where it did not end on the others."""


class Orphaned(TrainingError):
    """The coordinator was not heard of for too long."""


class RunFailed(TrainingError):
    """The run failed; the message is the root cause."""
