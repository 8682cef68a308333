"""`paceline`: the command line. What a command needs is imported when it runs: `--help` stays quick."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from paceline.cli import people
from paceline.cli.bench.allreduce.command import allreduce
from paceline.cli.bench.app import app as bench_app
from paceline.cli.bench.links.command import links
from paceline.cli.bench.steps.command import script
from paceline.cli.join import CodeFirst, join
from paceline.cli.run import SCRIPT_SETTINGS, run

app = typer.Typer(
    name="paceline",
    help="Trains one PyTorch model on whatever machines there are.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command(context_settings=SCRIPT_SETTINGS)(run)
app.command(cls=CodeFirst, context_settings=SCRIPT_SETTINGS)(join)
app.command()(people.status)
app.command()(people.invite)
app.command()(people.drain)
app.command()(people.stop)
app.command()(people.logs)
bench_app.command(context_settings=SCRIPT_SETTINGS)(script)
bench_app.command()(allreduce)
bench_app.command()(links)
app.add_typer(bench_app, name="bench")


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    try:
        version = metadata.version("paceline")
    except metadata.PackageNotFoundError:
        version = "(run from its source, not installed)"
    typer.echo(f"paceline {version}")
    raise typer.Exit


@app.callback()
def _paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Trains one PyTorch model on whatever machines there are."""


def main() -> None:
    app()


if __name__ == "__main__":
    main()
