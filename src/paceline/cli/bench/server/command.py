"""`paceline bench server`: options in, tables out."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.bench.app import check_output, errors_told, measuring, output_console
from paceline.cli.bench.errors import BadInput
from paceline.cli.bench.server import plan as plans

_SIZES = {plans.DENSE: 25_000_000, plans.SPARSE: 10_000_000}


def server(
    work: Annotated[
        str, typer.Option(metavar="dense|sparse", help="All parameters at once, or rows of a table.")
    ] = plans.DENSE,
    size: Annotated[int | None, typer.Option(help="Parameters, or rows.", show_default="25 or 10 million")] = None,
    dim: Annotated[int, typer.Option(help="Numbers in a row.")] = 16,
    batch: Annotated[int, typer.Option(help="Ids of one pull or push.")] = 100_000,
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many ask the one server.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds over everything; the figure is their median.")] = 5,
    seconds: Annotated[float, typer.Option(help="How long each measurement takes.")] = 3.0,
    against: Annotated[
        str | None, typer.Option(help="Others, by comma; empty for none.", show_default="all that are installed")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Times a parameter server with workers that only push and pull, beside others' on the same work."""
    with errors_told():
        if work not in plans.CONTENDERS:
            raise BadInput(f"--work {work}: give {plans.DENSE} or {plans.SPARSE}")
        others = plans.CONTENDERS[work][1:] if against is None else tuple(filter(None, against.split(",")))
        plan = plans.Plan(
            work=work,
            size=_SIZES[work] if size is None else size,
            num_workers=workers,
            num_rounds=rounds,
            seconds=seconds,
            contenders=(plans.PACELINE, *others),
            dim=dim,
            batch=batch,
        )
        check_output("--json", json)
        _measure_and_report(plan, json)


def _measure_and_report(plan: plans.Plan, json: Path | None) -> None:
    from paceline.cli.bench import machine, report
    from paceline.cli.bench.server import measure
    from paceline.cli.bench.server import report as own

    host = machine.describe()
    with measuring(plan.num_rounds * len(plan.contenders)) as tell:
        results = measure.run(plan, on_stage=lambda stage: tell(stage, 1))
    console = output_console()
    for table in own.tables(plan, results):
        console.print(table)
    if json is not None:
        command = shlex.join(["paceline", *sys.argv[1:]])
        report.write_json(json, {"command": command, "machine": host, **own.record(plan, results)})
