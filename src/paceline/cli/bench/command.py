"""`paceline bench allreduce`: options in, tables out. Everything is checked before anything is measured."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from paceline.cli.bench import plan as plans
from paceline.cli.bench.errors import BadInput
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.cli.bench.measure import Results, Step
    from paceline.cli.bench.peers import Library

app = typer.Typer(help="Measures Paceline against other libraries on this host.", no_args_is_help=True)

_BAD_INPUT = 2
_FAILED = 1
# Wide enough for five sizes when the output goes to a file instead of a terminal.
_FILE_WIDTH = 180


@app.callback()
def _bench() -> None:
    """Measures Paceline against other libraries on this host."""


@app.command()
def allreduce(
    ranks: Annotated[int, typer.Option(help="Processes of each library.")] = 2,
    sizes: Annotated[str, typer.Option(help="Sizes of the tensor; 1KB is 1024 bytes.")] = ("1KB,64KB,1MB,16MB,100MB"),
    algorithms: Annotated[
        str, typer.Option(help=f"Of Paceline: {', '.join(plans.ALGORITHMS)}; or {plans.NONE}.")
    ] = "auto",
    tensors: Annotated[str, typer.Option(help="Where Paceline's tensors live: arena, ordinary.")] = ("arena,ordinary"),
    against: Annotated[
        str | None,
        typer.Option(help="gloo, openmpi, impi; or none.", show_default="all that are installed"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds over everything; the figure is their median.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw bandwidth over size into this file.")] = None,
) -> None:
    """Times float32 sum all-reduce of all libraries in one interleaved run."""
    try:
        libraries = _libraries(against)
        plan = plans.Plan(
            num_ranks=ranks,
            num_rounds=rounds,
            num_threads=threads,
            sizes=plans.parse_sizes(sizes),
            contenders=plans.contenders_of(
                plans.parse_names("--algorithms", algorithms, plans.ALGORITHMS),
                plans.parse_names("--tensors", tensors, plans.TENSORS),
                [library.name for library in libraries],
            ),
        )
        _check_outputs(json, plot)
        _measure_and_report(plan, libraries, json=json, plot=plot)
    except BadInput as error:
        _leave(error, _BAD_INPUT)
    except (PacelineError, OSError) as error:
        _leave(error, _FAILED)


def _libraries(against: str | None) -> list[Library]:
    """The peers asked for, or all that are here; a line on stderr for each that is not."""
    from paceline.cli.bench import peers

    wanted = peers.PEERS if against is None else plans.parse_names("--against", against, peers.PEERS)
    found = []
    for name in wanted:
        library = peers.find(name)
        if isinstance(library, peers.Library):
            found.append(library)
        elif against is None:
            typer.echo(f"{name} is left out, it is not installed; to compare: {library.remedy}", err=True)
        else:
            raise BadInput(f"--against: {name} is not installed; {library.remedy}")
    return found


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    from paceline.cli.bench import report

    for option, path in (("--json", json), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir():
            raise BadInput(f"{option} {path}: this is a folder; give the name of a file")
        if not path.absolute().parent.is_dir():
            raise BadInput(f"{option} {path}: there is no folder {path.absolute().parent}; make it first")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise BadInput(f"{option} {path}: cannot be written; give another place")
    if plot is not None:
        report.check_can_plot(plot)


def _measure_and_report(plan: plans.Plan, libraries: list[Library], *, json: Path | None, plot: Path | None) -> None:
    from rich.console import Console

    from paceline.cli.bench import machine, peers, report

    host = machine.describe()
    own = peers.find(plans.PACELINE) if plans.PACELINE in plan.libraries else None
    if isinstance(own, peers.Library):
        libraries = [own, *libraries]
    results = _measure(plan, libraries)
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    for table in report.tables(plan, results):
        console.print(table)
    if json is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        report.write_json(json, report.record(plan, results, machine=host, command=command))
    if plot is not None:
        report.write_plot(plot, plan, results)


def _measure(plan: plans.Plan, libraries: list[Library]) -> Results:
    """Runs the plan under a display of how far it is, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from paceline.cli.bench import measure

    # Redrawn once a second: a livelier display takes time from what is measured.
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    display = Progress(*columns, console=console, transient=True, refresh_per_second=1, disable=not console.is_terminal)
    with _terminated_like_ctrl_c(), display as progress:
        total = plan.num_rounds * len(plan.sizes) * len(plan.contenders)
        task = progress.add_task("starting", total=total)

        def on_step(step: Step) -> None:
            size = plans.format_size(step.num_bytes)
            name = f"round {step.round_index + 1}, {size}, {step.contender.label}"
            progress.update(task, description=name, advance=1)

        def on_stage(stage: str) -> None:
            progress.update(task, description=stage)

        return measure.run(plan, libraries, on_stage=on_stage, on_step=on_step)


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
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


def _leave(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
