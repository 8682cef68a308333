"""`paceline bench allreduce`: options in, tables out. Everything is checked before anything is measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench.allreduce import plan as plans
from paceline.cli.bench.app import check_output, errors_told, measuring, output_console, this_command

if TYPE_CHECKING:
    from paceline.cli.bench.allreduce.libraries import BenchLibrary
    from paceline.cli.bench.allreduce.measure import AllReduceResults, Measurement


def allreduce(
    ranks: Annotated[int, typer.Option(help="Processes of each library.")] = 2,
    sizes: Annotated[str, typer.Option(help="Sizes of the tensor; 1KB is 1024 bytes.")] = plans.SIZES,
    algorithms: Annotated[
        str, typer.Option(help=f"Of Paceline: {', '.join(plans.ALGORITHMS)}; or {plans.NONE}.")
    ] = "auto",
    tensors: Annotated[str, typer.Option(help="Where Paceline's tensors live: arena, ordinary.")] = "arena,ordinary",
    gloo: Annotated[bool, typer.Option("--gloo/--no-gloo", help="Also torch's Gloo.")] = True,
    rounds: Annotated[int, typer.Option(help="Rounds over everything; the figure is their median.")] = 5,
    threads: Annotated[int, typer.Option(help="Threads of each process.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Times float32 sum all-reduce on this host, Paceline and Gloo in one interleaved run."""
    with errors_told():
        plan = plans.AllReducePlan(
            num_ranks=ranks,
            num_rounds=rounds,
            num_threads=threads,
            sizes=plans.parse_sizes(sizes),
            contenders=plans.contenders_of(
                plans.parse_names("--algorithms", algorithms, plans.ALGORITHMS),
                plans.parse_names("--tensors", tensors, plans.TENSORS),
                [plans.GLOO] if gloo else [],
            ),
        )
        check_output("--json", json)
        _measure_and_report(plan, json)


def _measure_and_report(plan: plans.AllReducePlan, json: Path | None) -> None:
    from paceline.cli.bench import machine
    from paceline.cli.bench.allreduce import libraries, report

    head = {"benchmark": "allreduce", "command": this_command(), "machine": machine.describe()}
    known = {library.name: library for library in (libraries.OURS, libraries.TORCH_GLOO)}
    results = measure_shown(plan, [known[name] for name in plan.libraries])
    console = output_console()
    for table in report.tables(plan, results):
        console.print(table)
    if json is not None:
        machine.write_json(json, {**head, **report.record(plan, results)})


def measure_shown(plan: plans.AllReducePlan, libraries: list[BenchLibrary]) -> AllReduceResults:
    """Measures all of it, with a display of how far it is."""
    from paceline.cli.bench.allreduce import measure

    with measuring(plan.num_rounds * len(plan.sizes) * len(plan.contenders)) as tell:

        def on_step(step: Measurement) -> None:
            tell(f"round {step.round_index + 1}, {plans.format_size(step.num_bytes)}, {step.contender.label}", 1)

        return measure.run(plan, libraries, on_stage=lambda stage: tell(stage, 0), on_step=on_step)
