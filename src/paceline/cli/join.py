"""`paceline join`: workers and servers of this machine for a run that lives on another one."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from paceline.cli.leaving import BAD_INPUT, leave
from paceline.cli.run import CapacityOption, FolderOption, ServersOption, StrictOption
from paceline.cli.script import command_of
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.engine.slots import AgentRules

DOOR_S = 15.0


class CodeFirst(TyperCommand):
    """Options may stand between CODE and the script, where those of the script itself begin."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and (args[0] == "-" or not args[0].startswith("-")):
            args = ["--code", *args]
        return super().parse_args(ctx, args)


def join(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[SCRIPT [ARGS]...]", help="The script and its arguments.")
    ] = None,
    code: Annotated[
        str, typer.Option(metavar="CODE", help="The invitation; - for stdin, @FILE for a file.", show_default="first")
    ] = "",
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers to start here.")] = 1,
    servers: ServersOption = 0,
    folder: FolderOption = Path("runs"),
    restarts: Annotated[int, typer.Option(help="How often a process that died is started again.")] = 3,
    strict: StrictOption = False,
    capacity: CapacityOption = "",
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Joins a run with workers of this machine: paceline join CODE -n 2 train.py. They take part from the next step
    on. With servers only: paceline join CODE --servers 1 -n 0."""
    try:
        code, script = _split(code, words or [])
        rules = _rules(script, workers, servers, restarts, strict=strict)
        command = command_of(script, is_module=module) if script else ()
        words = ["-m", *script] if module else script
        exit_code = _join(read_code(code), command, rules, folder, capacity, words)
    except (PacelineError, ValueError, OSError) as error:
        leave(error, BAD_INPUT)
    raise typer.Exit(exit_code)


def _split(code: str, words: list[str]) -> tuple[str, list[str]]:
    """CODE and the script, however they were given."""
    if not code and not words:
        raise ValueError("there is no invitation; get one with paceline invite, and write: paceline join CODE train.py")
    return (code, words) if code else (words[0], words[1:])


def _rules(script: list[str], workers: int, servers: int, restarts: int, *, strict: bool) -> AgentRules:
    from paceline.engine.slots import AgentRules

    rules = AgentRules(workers=workers, servers=servers, restarts=restarts, strict=strict, owns_coordinator=False)
    if workers and not script:
        raise ValueError(
            "there is no script to run; write: paceline join CODE -n 2 train.py, or, to join with servers only, "
            "paceline join CODE --servers 1 -n 0"
        )
    if script and not workers:
        raise ValueError(f"-n 0: no worker would run {script[0]}; leave the script out, or give -n 1 or more")
    return rules


def read_code(code: str) -> str:
    """CODE in an argument can be seen by other users of the machine; in a file or a pipe it cannot."""
    if code == "-":
        return sys.stdin.readline()
    if code.startswith("@"):
        try:
            return Path(code[1:]).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{code}: the invitation cannot be read: {error}") from error
    return code


def _join(code: str, command: tuple[str, ...], rules: AgentRules, root: Path, capacity: str, script: list[str]) -> int:
    from paceline.control.shell import invitation
    from paceline.engine import folders, running, speeds
    from paceline.engine.local import Job
    from paceline.wire.deadline import Deadline
    from paceline.wire.reaching import own_address

    speed = speeds.parse_capacity(capacity)
    ticket = invitation.enter(code, deadline=Deadline(DOOR_S, "entering the run by its invitation"))
    address = own_address(ticket.host, ticket.address)
    with contextlib.closing(folders.claim_for_guest(root, ticket.run)) as place:
        job = Job(command=command, workers=rules.workers, run=ticket.run, ranked=False, environment=speed.environment)
        with running.Lifetime(place) as life:
            outcome = life.join(ticket, rules, speed, running.local_engine(job, place.logs))
            explanation = life.explanation(outcome)
        resume = _resume_command(place.folder, address, rules, ticket.replicas, script)
        running.report(outcome, explanation, place, resume)
        return outcome.code


def _resume_command(
    folder: Path, address: str, rules: AgentRules, replicas: int, script: list[str]
) -> list[str] | None:
    """What makes this machine the run's host, from what its workers left; with as many copies as it has servers for."""
    if not rules.workers:
        return None
    where = ["--folder", str(folder.parent), "--name", folder.name, "--listen", address]
    copies = str(min(replicas, rules.servers))
    servers = ["--servers", str(rules.servers), "--replicas", copies] if rules.servers else []
    return ["paceline", "run", "--resume", *where, "-n", str(rules.workers), *servers, *script]
