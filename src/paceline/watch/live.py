"""One look as a picture for a terminal: pure, from a `Look` and the size of the screen to something rich can draw.

It fits: never more lines than the screen has where that is possible, columns by importance where it is narrow. Texts
from elsewhere are shown as they are, never taken for markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.reader import EventRow
from paceline.watch import newcomers, servers, sharing, words
from paceline.watch.look import STILL, Look
from paceline.watch.names import Names

MAX_MEMBERS = 20
MAX_EVENTS = 8
MAX_BAR = 100
NARROW, VERY_NARROW = 80, 50
LOW = 12  # a screen with fewer lines has no room for notes

STATE_STYLE = {
    "running": "green",
    "ended": "green",
    "gathering": "yellow",
    "fencing": "yellow",
    "interrupted": "yellow",
    "failed": "red",
    "active": "green",
    "dead": "red",
    "evicted": "red",
    "refused": "red",
}
KIND_STYLE = {
    "joined": "green",
    "dead": "red",
    "failed": "red",
    "evicted": "red",
    "refused": "red",
    "lost": "red",
    "lost ranges": "red",
    "lost updates": "red",
    "not saved": "red",
    "rollback": "yellow",
    "warning": "yellow",
    "halting": "yellow",
    "draining": "yellow",
    "checkpoint": "blue",
    "plan": "cyan",
    "shares": "cyan",
    "placement": "cyan",
}
KIND_WORDS = {"dead": "died", "released": "left"}
OF_LIVES = ("joined", "draining", "released", "dead", "failed", "evicted", "refused")  # of workers and servers alike


def picture(look: Look, width: int, height: int) -> RenderableType:
    """Header, bar, workers, servers, events."""
    head: list[RenderableType] = [header(look)]
    if (fraction := look.fraction) is not None:
        bar = Table.grid()  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=1.0, completed=fraction, width=max(1, min(width, MAX_BAR))))
        head.append(bar)
    events = look.events[-min(MAX_EVENTS, max(1, height // 4)) :]
    notes = sharing_lines(look) if height >= LOW else []
    if look.living_servers:
        serving = servers.in_one_line(look.living_servers)
        notes.insert(0, Text(serving, no_wrap=True, overflow="ellipsis"))
    if look.newcomers and height >= LOW:
        notes.insert(0, newcomer_line(look))
    # A header of two lines, two headings, the line for the others.
    room = height - len(head) - len(events) - len(notes) - 4
    parts: list[RenderableType] = [*head]
    if look.workers:
        parts.append(worker_table(look.living_workers, look.workers, look.names, width, max(1, min(MAX_MEMBERS, room))))
    parts.extend(notes)
    parts.extend(event_line(event, look.names) for event in events)
    return Group(*parts)


def sharing_lines(look: Look) -> list[Text]:
    """Why the shares are what they are, and which hosts have too many workers."""
    lines = []
    if look.sharing is not None:
        lines.append(Text(sharing.last_change(look.sharing), style="dim", no_wrap=True, overflow="ellipsis"))
    if look.state not in STILL:
        lines += [
            Text(line, style="yellow", no_wrap=True, overflow="ellipsis") for line in sharing.crowded(look.members)
        ]
    return lines


def newcomer_line(look: Look) -> Text:
    return Text(newcomers.in_one_line(look.newcomers), style="yellow", no_wrap=True, overflow="ellipsis")


def header(look: Look) -> Text:
    text = Text(overflow="fold")
    text.append(words.one_line(look.name, 40), style="bold")
    text.append("  ")
    text.append(look.state, style=STATE_STYLE.get(look.state, ""))
    for part in figures(look):
        text.append(f"  {part}")
    if look.is_deserted:
        text.append("  its coordinator is gone", style="red")
    elif look.quiet_s:
        text.append(f"  no step for {words.duration(look.quiet_s)}", style="yellow")
    if look.state == "failed" and look.reason:
        text.append(f"\n{words.one_line(look.reason, 400)}", style="red")
    return text


def figures(look: Look) -> list[str]:
    """What there is to say of the progress, in the order of the header."""
    parts = []
    if look.epoch is not None:
        of = f"/{look.num_epochs}" if look.num_epochs else ""
        percent = f" ({look.fraction:.0%})" if look.fraction is not None else ""
        parts += [f"epoch {look.epoch + 1}{of}{percent}", f"step {look.step:,}", f"loss {words.number(look.loss)}"]
        parts.append(f"{words.rate(look.samples_per_s)} samples/s")
    if look.remaining_s is not None:
        parts.append(f"{words.duration(look.remaining_s)} left" + ("" if look.num_epochs else " in this epoch"))
    if look.started:
        parts.append(f"{words.duration(look.elapsed_s)} elapsed")
    return parts


def worker_table(shown: Sequence[MemberRow], known: Sequence[MemberRow], names: Names, width: int, most: int) -> Table:
    """A line for each worker up to `most`; how many others there are, and what became of those that are gone."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    columns = [("rank", "right"), ("worker", "left"), ("state", "left"), ("samples/s", "right")]
    if width >= VERY_NARROW:
        columns += [("share", "right"), ("host", "left")]
    if width >= NARROW:
        columns += [("step time", "right"), ("pid", "right")]
    for name, side in columns:
        table.add_column(name, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis")
    for member in shown[:most]:
        state = state_of(member)
        cells: dict[str, str | Text] = {
            "rank": str(member.rank) if member.rank >= 0 else words.NOT_KNOWN,
            "worker": Text(names.short(member.member)),
            "state": Text(state, style=STATE_STYLE.get(state, "")),
            "samples/s": words.rate(member.samples_per_s),
            "share": str(member.share) if member.rank >= 0 else words.NOT_KNOWN,
            "host": Text(words.one_line(member.host, 40)),
            "step time": f"{member.step_s * 1000:,.0f} ms" if member.step_s > 0 else words.NOT_KNOWN,
            "pid": str(member.pid),
        }
        table.add_row(*(cells[name] for name, _ in columns))
    if rest := others(shown, known, most):
        table.caption = Text(rest, style="dim")
        table.caption_justify = "left"
    return table


def others(shown: Sequence[MemberRow], known: Sequence[MemberRow], most: int) -> str:
    """... and 980 more; gone: 2 died, 1 left"""
    parts = []
    if len(shown) > most:
        parts.append(f"... and {len(shown) - most:,} more")
    listed = {member.member for member in shown}
    gone = Counter(KIND_WORDS.get(row.fate, row.fate) for row in known if row.fate and row.member not in listed)
    if gone:
        parts.append("gone: " + ", ".join(f"{amount:,} {fate}" for fate, amount in sorted(gone.items())))
    return "; ".join(parts)


def state_of(member: MemberRow) -> str:
    return member.fate or member.phase


def event_line(event: EventRow, names: Names = Names()) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{words.clock(event.time)} ", style="dim")
    text.append(event_text(event, names), style=KIND_STYLE.get(event.kind, ""))
    return text


def event_text(event: EventRow, names: Names = Names()) -> str:
    """died worker w1: process 4711 was killed; warning 1f00ab12: out of memory"""
    kind = KIND_WORDS.get(event.kind, event.kind)
    who = ""
    if event.member:
        who = f" {names.with_role(event.member) if event.kind in OF_LIVES else names.short(event.member)}"
    text = names.in_text(event.text)
    return words.one_line(f"{kind}{who}: {text}" if text else f"{kind}{who}", 300)
