"""What the benchmarks' commands have in common: errors as exit codes, checks of outputs, a display of how far they are,
and an end that cleans up."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from typer.core import TyperGroup

from paceline.cli.bench.errors import BadInput
from paceline.cli.leaving import BAD_INPUT, FAILED, leave
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from rich.console import Console


class ScriptOrCommand(TyperGroup):
    """What is no command is a script, with the options of the command `script` before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, "--help"):
            args = ["script", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=ScriptOrCommand, help="Measures your script, this host, and the links between yours.", no_args_is_help=True
)

# Wide enough for five sizes when the output goes to a file instead of a terminal.
_FILE_WIDTH = 180

# Called with what is being done now, and how many of the measurements were done since the last call.
Tell = Callable[[str, int], None]


@app.callback()
def _bench() -> None:
    """Measures your script, this host, and the links between yours: paceline bench train.py"""


@contextmanager
def errors_told() -> Iterator[None]:
    """An error ends the command with its message and a code that tells whose fault it was."""
    try:
        yield
    except BadInput as error:
        leave(error, BAD_INPUT)
    except (PacelineError, OSError) as error:
        leave(error, FAILED)


def check_output(option: str, path: Path | None) -> None:
    """Before anything is measured: whether it can be written."""
    if path is None:
        return
    if path.is_dir():
        raise BadInput(f"{option} {path}: this is a folder; give the name of a file")
    if not path.absolute().parent.is_dir():
        raise BadInput(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise BadInput(f"{option} {path}: cannot be written; give another place")


def this_command() -> str:
    """As it was typed, for the record."""
    return shlex.join(["paceline", *sys.argv[1:]])


def output_console() -> Console:
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)


@contextmanager
def measuring(total: int) -> Iterator[Tell]:
    """A display of how far it is, on stderr; Ctrl-C, SIGTERM and a closed terminal all end it in the same way."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # Redrawn once a second: a livelier display takes time from what is measured.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    display = Progress(*columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal)
    with terminated_like_ctrl_c(), display as progress:
        task = progress.add_task("starting", total=total)

        def tell(what: str, advance: int) -> None:
            progress.update(task, description=what, advance=advance)

        yield tell


@contextmanager
def terminated_like_ctrl_c() -> Iterator[None]:
    """A SIGTERM or a closed terminal cleans up as Ctrl-C does."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    # What is ignored stays so: that is how `nohup` works.
    heeded = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
