"""What hosts left when they lost the host of their coordinator, and which of them goes on."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from paceline.control.journal.journal import JournalError
from paceline.control.journal.reader import RunReader
from paceline.control.leases.messages import GRANTED_AHEAD
from paceline.custody import names
from paceline.testing.chaos.placing import is_held_without
from paceline.testing.chaos.schedule import Mode
from paceline.testing.chaos.stage import NAME, ChaosRun, Command


def held_by(stage: ChaosRun, guest: Command) -> names.FoundCheckpoint | None:
    """The newest checkpoint that a host left."""
    return next(iter(names.find(stage.guests(guest.host) / NAME / names.FOLDER)), None)


def heir_of(stage: ChaosRun, guests: list[Command]) -> tuple[int, Path] | None:
    """The host that has come furthest, of those that were told how to go on, with what it has; None where nothing is
    left but what is on the lost host."""
    told = [one.host for one in guests if one.host and _resume_words(one) is not None]
    held = [(found, host) for one in guests if (host := one.host) in told and (found := held_by(stage, one))]
    found, host = max(held, key=lambda one: (one[0].operation, -one[1]), default=(None, 0))
    return (host, found.path) if found is not None else None


def wrong_with(stage: ChaosRun, guests: list[Command], *, is_whole: bool) -> Iterator[str]:
    """`is_whole` says that all workers were at work when the host was lost: then none of the others is far behind."""
    told = [one for one in guests if _resume_words(one) is not None]
    for guest in told:
        yield from _wrong_words(stage, guest)
    if not is_whole:
        return
    if not told and any(one.workers for one in guests) and _can_be_saved(stage):
        yield "host 0 was lost, and no other host says how to go on from what it holds"
    held = [found.operation for one in told if (found := held_by(stage, one))]
    recorded = _last_recorded(stage)
    if held and max(held) + 1 < recorded:
        yield f"host 0 was lost after operation {recorded} was recorded; the others hold operation {max(held)}"
    allowed = most_apart(stage.schedule.mode, sum(one.workers for one in guests))
    if held and max(held) - min(held) > allowed:
        yield f"the hosts that lost host 0 hold operations {', '.join(map(str, held))}: more than {allowed} apart"


def most_apart(mode: Mode, num_workers: int) -> int:
    """Where all step together, a worker may have missed the last step. Where each does leases, it saves what servers
    have when it gives the coordinator up: others may have done, or do after that, all that they had been granted."""
    return num_workers * GRANTED_AHEAD if mode.is_leased else 1


def _can_be_saved(stage: ChaosRun) -> bool:
    """Whether workers can have all of the state: none of it is with servers of the lost host alone."""
    return not stage.schedule.mode.has_servers or is_held_without(stage, 0)


def _last_recorded(stage: ChaosRun) -> int:
    try:
        with RunReader(stage.folder) as reader:
            return max((row.operation for row in reader.steps()), default=0)
    except JournalError:
        return 0


def _resume_words(guest: Command) -> list[str] | None:
    """The command that a person would copy."""
    lines = guest.output.read_text(errors="replace").splitlines()
    found = [line for line in lines if "paceline run --resume" in line]
    return shlex.split(found[-1]) if found else None


def _wrong_words(stage: ChaosRun, guest: Command) -> Iterator[str]:
    words = _resume_words(guest) or []
    script = stage.script()
    where = {name: words[words.index(name) + 1] for name in ("--folder", "--name", "--listen") if name in words}
    right = {"--folder": str(stage.guests(guest.host)), "--name": NAME, "--listen": stage.lab[guest.host].address}
    if where != right or tuple(words[-len(script) :]) != script:
        yield f"{guest} says how to go on with: {shlex.join(words)}; but it is {right} and {shlex.join(script)}"
