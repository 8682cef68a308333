"""How commands end when they cannot do what was asked: one line, and an exit code that says whose fault it is."""

from __future__ import annotations

from typing import NoReturn

import typer

BAD_INPUT = 2
FAILED = 1


def leave(error: Exception, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)
