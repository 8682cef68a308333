"""Which checkpoints stay, and the links `latest` and `best`.

The newest `keep_last` stay, and the `keep_best` with the lowest scores. Scores are in `scores.json` beside the
checkpoints, so that they outlive the process. The links are relative, replaced by a rename, and always point at a
checkpoint that is there: links move first, checkpoints go after.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline.custody import names
from paceline.custody.partial import retire

SCORES = "scores.json"


class RetentionRules(NamedTuple):
    keep_last: int
    keep_best: int

    def check(self) -> None:
        if type(self.keep_last) is not int or self.keep_last < 1:
            raise ValueError(f"keep_last={self.keep_last!r} must be a whole number of at least 1")
        if type(self.keep_best) is not int or self.keep_best < 0:
            raise ValueError(f"keep_best={self.keep_best!r} must be a whole number of at least 0")


class Choice(NamedTuple):
    keep: frozenset[int]
    latest: int | None
    best: int | None


def choose(operations: Iterable[int], scores: Mapping[int, float], rules: RetentionRules) -> Choice:
    """Of equal scores the earlier one is better; a score that is not finite is none."""
    there = sorted(operations)
    scored = [operation for operation in there if math.isfinite(scores.get(operation, math.nan))]
    ranked = sorted(scored, key=lambda operation: scores[operation])
    keep = frozenset(there[-rules.keep_last :] + ranked[: rules.keep_best])
    return Choice(keep, there[-1] if there else None, ranked[0] if ranked and rules.keep_best else None)


class Shelf:
    """A folder of checkpoints under rules. Used by one thread at a time."""

    def __init__(self, folder: Path, rules: RetentionRules) -> None:
        self._folder = folder
        self._rules = rules
        self._scores: dict[int, float] = {}

    def tidy(self, new_scores: Mapping[int, float], *, published: int | None = None) -> list[Path]:
        """Take the scores in, move the links, remove what need not stay; returns what was removed. One that was just
        published has no older score: that was of another checkpoint of the same operation."""
        # Another process may have been the keeper meanwhile.
        self._scores = _read_scores(self._folder / SCORES)
        there = {found.operation: found.path for found in names.find(self._folder)}
        scores = {operation: value for operation, value in self._scores.items() if operation != published}
        scores.update(new_scores)
        choice = choose(there, scores, self._rules)
        self._write_scores({operation: scores[operation] for operation in choice.keep if operation in scores})
        self._link("latest", there, choice.latest)
        self._link("best", there, choice.best)
        doomed = [path for operation, path in sorted(there.items()) if operation not in choice.keep]
        for path in doomed:
            retire(path)
        return doomed

    def _write_scores(self, scores: dict[int, float]) -> None:
        if scores == self._scores:
            return
        fresh = self._folder / f".{SCORES}.new"
        with fresh.open("w") as file:
            json.dump({str(operation): scores[operation] for operation in sorted(scores)}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, self._folder / SCORES)
        self._scores = scores

    def _link(self, name: str, there: Mapping[int, Path], operation: int | None) -> None:
        link, fresh = self._folder / name, self._folder / f".{name}.new"
        with contextlib.suppress(FileNotFoundError):
            fresh.unlink()
        if operation is None:
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            return
        target = there[operation].name
        if not link.is_symlink() or os.readlink(link) != target:
            fresh.symlink_to(target)
            os.replace(fresh, link)


def _read_scores(path: Path) -> dict[int, float]:
    """Scores decide only what is kept: a file of them that cannot be read is one without scores."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[int, float])
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
