"""`paceline bench shares`: options in, tables out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.app import check_output, errors_told, measuring, output_console
from paceline.cli.bench.shares import plan as plans


def shares(
    work: Annotated[
        str,
        typer.Option(metavar="cnn|timed", help="A small CNN on these cores, or a device for each worker, imitated."),
    ] = plans.CNN,
    speeds: Annotated[str, typer.Option(help="Of the workers; 1 is a whole core, or device.")] = "1,0.5,0.25",
    samples: Annotated[int, typer.Option(help="Of each worker in a step, if all had the same.")] = 64,
    rounds: Annotated[int, typer.Option(help="Rounds over everything; the figure is their median.")] = 3,
    seconds: Annotated[float, typer.Option(help="How long each measurement takes.")] = 10.0,
    change_every: Annotated[int, typer.Option(help="Let speeds change every so many steps; 0 for never.")] = 200,
    changes: Annotated[int, typer.Option(help="How often they change.")] = 3,
    ddp: Annotated[bool, typer.Option("--ddp/--no-ddp", help="Also DistributedDataParallel on Gloo.")] = True,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Times workers of unequal speed together, beside the sum of what each does alone."""
    with errors_told():
        plan = plans.Plan(
            work=work,
            speeds=plans.parse_speeds(speeds),
            samples=samples,
            num_rounds=rounds,
            seconds=seconds,
            change_every=change_every,
            num_changes=changes,
            against=(plans.DDP,) if ddp else (),
        )
        check_output("--json", json)
        _measure_and_report(plan, json)


def _measure_and_report(plan: plans.Plan, json: Path | None) -> None:
    from paceline.cli.bench import machine, report
    from paceline.cli.bench.shares import measure
    from paceline.cli.bench.shares import report as own

    host = machine.describe()
    with measuring(plan.num_rounds * (len(plan.contenders) + bool(plan.change_every))) as tell:
        results = measure.run(plan, on_stage=lambda stage: tell(stage, 1))
    console = output_console()
    for table in own.tables(plan, results):
        console.print(table)
    if json is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        report.write_json(json, {"command": command, "machine": host, **own.record(plan, results)})
