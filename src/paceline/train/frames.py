"""Tracebacks as a script's author needs them: his own lines, and the error.

`boundary` stands around what scripts call. Where an error that leaves it speaks for itself, the frames of Paceline are
taken out of its traceback:

- it is one of Paceline's own sentences: raised by a `raise` of Paceline, as a refusal of what the script gave, or as an
  error of Paceline's tree;
- it comes from a function of the script that Paceline called (`loss_fn`, a callback, a data set).

All others, which may be mistakes of Paceline, stay as they are. What was taken out is in the log, at level DEBUG.
"""

from __future__ import annotations

import dis
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import ParamSpec, TypeVar

import torch

import paceline
from paceline.errors import PacelineError

logger = logging.getLogger("paceline.train")

_REFUSALS = (ValueError, TypeError, RuntimeError)
_OURS = os.path.join(os.path.dirname(os.path.abspath(paceline.__file__)), "")
_SCRIPTS = os.path.join(_OURS, "testing", "")  # trainings of our own are scripts too
_GENERATED = "<string>"  # what dataclasses write
_TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__)), "")

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def boundary(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """What scripts call."""

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise  # without a frame of its own

    return call


def boundary_of_loop(function: Callable[Given, Iterator[Returned]]) -> Callable[Given, Iterator[Returned]]:
    """The same for what scripts iterate over."""

    @functools.wraps(function)
    def iterate(*args: Given.args, **kwargs: Given.kwargs) -> Iterator[Returned]:
        try:
            yield from function(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    return iterate


def hide_frames(error: BaseException) -> None:
    """Of this error and of those that led to it. The frame that handles it may be among them: raised again from there,
    it stays hidden."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        pending += [one.__cause__, one.__context__]
        trace = _listed(one.__traceback__)
        if any(_is_ours(entry) for entry in trace) and _speaks_for_itself(one, trace):
            if one is error:
                logger.debug("what an error came through", exc_info=(type(one), one, one.__traceback__))
            one.__traceback__ = _linked([entry for entry in trace if not _is_ours(entry)])


def _speaks_for_itself(error: BaseException, trace: Sequence[TracebackType]) -> bool:
    if _is_ours(trace[-1]):
        return isinstance(error, PacelineError) or (isinstance(error, _REFUSALS) and _is_raising(trace[-1]))
    first = next(number for number, entry in enumerate(trace) if _is_ours(entry))
    return any(not _is_ours(entry) and not _is_in(entry, _TORCH) for entry in trace[first:])


def _is_raising(entry: TracebackType) -> bool:
    """Whether it stands at a `raise`, and not at a call or an operation that failed."""
    code = entry.tb_frame.f_code.co_code
    return 0 <= entry.tb_lasti < len(code) and dis.opname[code[entry.tb_lasti]] == "RAISE_VARARGS"


def _is_ours(entry: TracebackType) -> bool:
    if entry.tb_frame.f_code.co_filename == _GENERATED:
        return str(entry.tb_frame.f_globals.get("__name__", "")).startswith("paceline.")
    return _is_in(entry, _OURS) and not _is_in(entry, _SCRIPTS)


def _is_in(entry: TracebackType, folder: str) -> bool:
    return entry.tb_frame.f_code.co_filename.startswith(folder)


def _listed(trace: TracebackType | None) -> list[TracebackType]:
    found = []
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _linked(entries: Sequence[TracebackType]) -> TracebackType | None:
    linked: TracebackType | None = None
    for entry in reversed(entries):
        linked = TracebackType(linked, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return linked
