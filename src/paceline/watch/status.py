"""One look at a run, for `paceline status`: as plain values for JSON, or as a table.

Both work for a run that is live, over, interrupted, or was never founded.
"""

from __future__ import annotations

import math
import os
import time
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.reader import EventRow, RunReader
from paceline.watch import servers, sharing, words
from paceline.watch.live import event_line, header, newcomer_line, sharing_lines, state_of, worker_table
from paceline.watch.look import STILL, Look, look_at
from paceline.watch.losses import find_shortfall
from paceline.watch.names import Names
from paceline.watch.servers import staleness_of

MAX_MEMBERS = 20
MAX_EVENTS = 10
UNLIMITED = 10_000


def console_here() -> Console:
    """For standard output. Into a file or a pipe, where nobody has said how wide it is, lines stay whole."""
    console = Console()
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(width=UNLIMITED)


def as_json(reader: RunReader) -> dict[str, Any]:
    """Plain values; what is not known is None, times are seconds since 1970."""
    look = look_at(reader, time.time())
    lost, unsaved, _ = find_shortfall(reader)
    return {
        "run": {**_run(look), "lost": lost or None, "not_saved": unsaved or None},
        "members": [_member(member, look.names) for member in look.members],
        "events": [_event(event) for event in look.events],
    }


def render(reader: RunReader, console: Console) -> None:
    """The same as a table."""
    look = look_at(reader, time.time())
    console.print(header(look))
    if look.reason and look.state != "failed":
        console.print(Text(words.one_line(look.reason, 400)))
    for lack in find_shortfall(reader).lines:
        console.print(Text(words.one_line(lack), style="red"))
    if look.started:
        console.print(Text(f"started {words.moment(look.started)}, generation {look.generation}, in {look.folder}"))
    if look.workers:
        console.print(worker_table(look.workers, look.workers, look.names, console.width, MAX_MEMBERS))
    if look.newcomers:
        line = newcomer_line(look)
        line.no_wrap = False
        console.print(line)
    if look.servers:
        if look.living_servers:
            console.print(Text(servers.in_one_line(look.living_servers)))
        console.print(servers.server_table(look.servers, look.names, console.width, MAX_MEMBERS))
    for line in sharing_lines(look):
        line.no_wrap = False
        console.print(line)
    for event in look.events[-MAX_EVENTS:]:
        console.print(event_line(event, look.names))


def _run(look: Look) -> dict[str, Any]:
    has_cursor = look.epoch is not None
    return {
        "name": look.name,
        "folder": str(look.folder),
        "state": look.state,
        "reason": look.reason,
        "coordinator_is_gone": look.is_deserted,
        "started": look.started or None,
        "ended": look.ended or None,
        "elapsed_s": look.elapsed_s,
        "remaining_s": look.remaining_s,
        "generation": look.generation,
        "epoch": look.epoch,
        "num_epochs": look.num_epochs or None,
        "step": look.step,
        "operation": look.operation if look.operation >= 0 else None,
        "cursor": {"epoch": look.epoch, "position": look.position} if has_cursor else None,
        "dataset_length": look.dataset_length or None,
        "global_batch": look.global_batch or None,
        "loss": _finite(look.loss),
        "samples_per_s": _finite(look.samples_per_s),
        "last_step": look.last_step or None,
        "shares": None if look.sharing is None else {"since": look.sharing.time, "reason": look.sharing.text},
        "starting": [msgspec.to_builtins(newcomer) for newcomer in look.newcomers],
        "crowded": [] if look.state in STILL else sharing.crowded(look.members),
    }


def _member(member: MemberRow, names: Names) -> dict[str, Any]:
    is_seated = member.rank >= 0
    return {
        "id": member.member,
        "role": member.role,
        "label": names.labels.get(member.member),
        "pid": member.pid,
        "host": member.host,
        "rank": member.rank if is_seated else None,
        "share": member.share if is_seated else None,
        "state": state_of(member),
        "reason": member.reason,
        "generation": member.generation,
        "samples_per_s": _finite(member.samples_per_s),
        "step_s": _finite(member.step_s),
        "starved": _finite(member.starved),
        "serving": _serving(member) if member.is_server else None,
        "joined": member.joined,
        "updated": member.updated,
    }


def _serving(server: MemberRow) -> dict[str, Any]:
    return {
        "num_ranges": server.ranges,
        "num_backups": server.backups,
        "num_arriving": server.arriving,
        "num_keys": server.num_keys,
        "num_bytes": server.num_bytes,
        "busy": _finite(server.busy),
        "staleness": staleness_of(server.staleness),
    }


def _event(event: EventRow) -> dict[str, Any]:
    return {"time": event.time, "kind": event.kind, "member": event.member or None, "text": event.text}


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None
