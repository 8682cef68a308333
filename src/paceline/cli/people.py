"""What a person asks of a run that is going on: status, invite, drain, stop, logs."""

from __future__ import annotations

import json as jsons
import re
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from paceline.cli.leaving import BAD_INPUT, FAILED, leave
from paceline.cli.run import FolderOption
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.control.shell.service import StatusAnswer

COMMAND_S = 10.0
FOLLOW_S = 0.2
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Answer = TypeVar("Answer")
NameOption = Annotated[str, typer.Option("--name", help="The run.", show_default="the only one going on")]


def invite(
    name: NameOption = "",
    folder: FolderOption = Path("runs"),
    valid: Annotated[str, typer.Option("--for", help="How long it is valid: 90s, 10m, 1h, 2d.")] = "1h",
    uses: Annotated[int, typer.Option(min=1, max=1_000_000, help="How often it may be used.")] = 1,
) -> None:
    """Prints an invitation, CODE, with which another machine joins the run."""
    from paceline.control.shell.invitation import Invited

    try:
        run = _find(folder, name)
        invited = _command(run, "invite", (_seconds(valid), uses), Invited)
    except (PacelineError, ValueError) as error:
        leave(error, BAD_INPUT)
    if invited.local_only:
        typer.echo(
            "this invitation works on this machine only, because the run listens on a loopback address; "
            "start the run with --listen ADDRESS to let others in",
            err=True,
        )
    typer.echo(invited.code)


def status(
    name: NameOption = "",
    folder: FolderOption = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Shows who is in a run and how far it is; also of one that is over, with --name."""
    from paceline.control.journal.reader import RunReader
    from paceline.watch import status as statuses

    try:
        with RunReader(_find(folder, name)) as reader:
            if json:
                typer.echo(jsons.dumps(statuses.as_json(reader), indent=2))
            else:
                statuses.render(reader, statuses.console_here())
    except (PacelineError, ValueError) as error:
        leave(error, BAD_INPUT)


def drain(
    member: Annotated[str, typer.Argument(help="A member's id or its beginning, its rank, or w0, s0, ... as printed.")],
    name: NameOption = "",
    folder: FolderOption = Path("runs"),
) -> None:
    """Asks a worker to leave after the step under way, or a server when others have what it holds; the run goes on."""
    from paceline.control.shell.service import StatusAnswer

    try:
        run = _find(folder, name)
        row = pick(member, _living(_command(run, "status", None, StatusAnswer)), _pids(run))
        _command(run, "drain", row["member"], type(None))
    except (PacelineError, ValueError) as error:
        leave(error, BAD_INPUT)
    what = "server" if row["role"] == "server" else f"rank {row['rank']}"
    typer.echo(f"asked member {row['member']} ({what}, process {row['pid']} on {row['host']}) to leave")


def stop(name: NameOption = "", folder: FolderOption = Path("runs")) -> None:
    """Ends a run after the step under way; it can be resumed."""
    try:
        run = _find(folder, name)
        is_at_work = _command(run, "halt", "a person asked for the end", bool)
    except (PacelineError, ValueError) as error:
        leave(error, BAD_INPUT)
    if is_at_work:
        typer.echo(f"{run.name} stops after the step under way")
    else:
        typer.echo(f"{run.name} stops now: its workers are still being started, and no step is under way")


def logs(
    member: Annotated[str, typer.Argument(help="As for drain; all, unless given.")] = "",
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on as long as the run does.")] = False,
    name: NameOption = "",
    folder: FolderOption = Path("runs"),
) -> None:
    """Prints what workers and servers have printed, those of machines that joined included. Without --name: of the only
    run that is going on, or of the newest if none is."""
    try:
        run = _find(folder, name, or_newest=True)
        _print_logs(run, partial(_logs_of, run, member), follow=follow)
    except (PacelineError, ValueError) as error:
        leave(error, BAD_INPUT)
    except BrokenPipeError:
        raise typer.Exit(FAILED) from None


# -- members ---------------------------------------------------------------------------------------------------------


def pick(wanted: str, rows: list[dict[str, Any]], pids: dict[str, list[int]]) -> dict[str, Any]:
    """The one member that is meant. `pids` are the processes that `paceline run` prints as w0, s0, and so on. Raises
    `ValueError` that lists who there is."""
    if re.fullmatch(r"[ws]\d+", wanted):
        newest = pids.get(wanted, [])[-1:]
        found = [row for row in rows if row["pid"] in newest]
    elif wanted.isdigit() and len(wanted) < 6:
        found = [row for row in rows if row["rank"] == int(wanted)]
    else:
        found = [row for row in rows if wanted and row["member"].startswith(wanted)]
    if len(found) == 1:
        return found[0]
    labels = {pid: label for label, started in pids.items() for pid in started}
    known = ", ".join(
        f"{row['member']} ({'server' if row['role'] == 'server' else 'rank ' + str(row['rank'])}"
        f"{', ' + labels[row['pid']] if row['pid'] in labels else ''})"
        for row in rows
    )
    problem = f"{wanted} is the beginning of several members" if found else f"there is no member {wanted}"
    raise ValueError(f"{problem}; members are: {known or 'none yet'}")


def _living(standing: StatusAnswer) -> list[dict[str, Any]]:
    return [row for row in standing.members if not row["fate"]]


def _pids(run: Path) -> dict[str, list[int]]:
    from paceline.control.journal.labels import read_started

    return read_started(run).slots


def _logs_of(run: Path, member: str) -> list[Path]:
    from paceline.control.journal.reader import RunReader
    from paceline.custody.custodian import JOINED_LOGS
    from paceline.engine.folders import LOGS

    folder = run / LOGS
    joined = folder / JOINED_LOGS
    if not member:
        return [path for where in (folder, *sorted(joined.glob("*/"))) for path in _logs_in(where)]
    label = member
    if not (folder / f"{member}.log").exists():
        with RunReader(run) as reader:
            rows = [
                {
                    "member": row.member,
                    "role": row.role,
                    "rank": row.rank,
                    "pid": row.pid,
                    "host": row.host,
                    "agent": row.agent,
                }
                for row in reader.members()
            ]
        row = pick(member, rows, _pids(run))
        places = sorted(joined.glob(f"*-{row['agent'][:8]}"))
        folder, pids = (places[0], _pids(places[0])) if row["agent"] and places else (folder, _pids(run))
        label = next((label for label, started in pids.items() if row["pid"] in started), "")
        if not label:
            raise ValueError(f"member {row['member']} runs on {row['host']}; its log is there")
    return [folder / f"{label}.log"]


def _logs_in(folder: Path) -> list[Path]:
    return [*sorted(folder.glob("w*.log")), *sorted(folder.glob("s*.log"))]


def _name_of(run: Path, log: Path) -> str:
    """w0, or w0 of a machine that joined."""
    return log.stem if log.parent.parent == run else f"{log.parent.name}/{log.stem}"


def _print_logs(run: Path, find_paths: Callable[[], list[Path]], *, follow: bool) -> None:
    from paceline.engine.folders import is_live
    from paceline.engine.output import CHUNK_BYTES, Splitter

    at: dict[Path, int] = {}
    splitters: defaultdict[Path, Splitter] = defaultdict(Splitter)
    while True:
        goes_on = follow and is_live(run)
        paths = find_paths()
        for path in paths:
            prefix = f"[{_name_of(run, path)}] " if len(paths) > 1 else ""
            with path.open("rb") as file:
                file.seek(at.setdefault(path, 0))
                while data := file.read(CHUNK_BYTES):
                    at[path] += len(data)
                    for line in splitters[path].feed(data):
                        typer.echo(prefix + line)
            if not goes_on:
                for line in splitters[path].flush():
                    typer.echo(prefix + line)
        if not goes_on:
            return
        time.sleep(FOLLOW_S)


# -- asking ----------------------------------------------------------------------------------------------------------


def _find(root: Path, name: str, *, or_newest: bool = False) -> Path:
    from paceline.engine.folders import find

    return find(root, name, or_newest=or_newest)


def _command(run: Path, operation: str, arguments: Any, answer_type: type[Answer]) -> Answer:
    from paceline.control.shell.client import command
    from paceline.control.shell.ticket import read_access
    from paceline.wire.deadline import Deadline

    ticket = read_access(run).ticket
    deadline = Deadline(COMMAND_S, f"asking the coordinator of {run.name} ({operation})")
    return command(ticket, operation, arguments, answer_type=answer_type, deadline=deadline)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text.strip())
    if found is None:
        raise ValueError(f"--for {text}: give a number and a unit, such as 90s, 10m, 1h or 2d")
    return float(found[1]) * _UNITS[found[2]]
