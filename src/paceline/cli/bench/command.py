"""`paceline bench allreduce`: options in, tables out. Everything is checked before anything is measured."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench import plan as plans
from paceline.cli.bench.app import check_output, errors_told, measuring, output_console
from paceline.cli.bench.errors import BadInput

if TYPE_CHECKING:
    from paceline.cli.bench.measure import Results, Step
    from paceline.cli.bench.peers import Library


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
    with errors_told():
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
        check_output("--json", json)
        check_output("--plot", plot)
        if plot is not None:
            from paceline.cli.bench import report

            report.check_can_plot(plot)
        _measure_and_report(plan, libraries, json=json, plot=plot)


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


def _measure_and_report(plan: plans.Plan, libraries: list[Library], *, json: Path | None, plot: Path | None) -> None:
    from paceline.cli.bench import machine, peers, report

    host = machine.describe()
    own = peers.find(plans.PACELINE) if plans.PACELINE in plan.libraries else None
    if isinstance(own, peers.Library):
        libraries = [own, *libraries]
    results = _measure(plan, libraries)
    console = output_console()
    for table in report.tables(plan, results):
        console.print(table)
    if json is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        report.write_json(json, report.record(plan, results, machine=host, command=command))
    if plot is not None:
        report.write_plot(plot, plan, results)


def _measure(plan: plans.Plan, libraries: list[Library]) -> Results:
    from paceline.cli.bench import measure

    with measuring(plan.num_rounds * len(plan.sizes) * len(plan.contenders)) as tell:

        def on_step(step: Step) -> None:
            tell(f"round {step.round_index + 1}, {plans.format_size(step.num_bytes)}, {step.contender.label}", 1)

        return measure.run(plan, libraries, on_stage=lambda stage: tell(stage, 0), on_step=on_step)
