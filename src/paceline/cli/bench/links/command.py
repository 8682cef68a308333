"""`paceline bench links`: the first host prints a code and waits, the others join by it, all print the same table."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench.app import (
    check_output,
    errors_told,
    measuring,
    output_console,
    terminated_like_ctrl_c,
    this_command,
)
from paceline.cli.bench.errors import BadInput
from paceline.cli.join import read_code

if TYPE_CHECKING:
    from paceline.cli.bench.links.gathering import GatheredHosts
    from paceline.cli.bench.links.measure import LinkFigures

MAX_HOSTS = 64
# Documentation only (RFC 5737): by the way there, this machine's address is found; nothing is sent.
_ELSEWHERE = ("192.0.2.1", 9)


def links(
    join: Annotated[
        str, typer.Option(metavar="CODE", help="What the first host printed; - for stdin, @FILE for a file.")
    ] = "",
    hosts: Annotated[int, typer.Option(help="On the first host: how many there are, itself included.")] = 2,
    listen: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="On the first host: its address, for the others.", show_default="that of its route"
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="What this host is called.", show_default="its own name")] = "",
    wait: Annotated[float, typer.Option(help="Seconds to wait for all hosts.")] = 600.0,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
) -> None:
    """Measures latency and bandwidth each way between every two hosts. Without --join this is the first host."""
    with errors_told():
        check_output("--json", json)
        if not 2 <= hosts <= MAX_HOSTS:
            raise BadInput(f"--hosts {hosts}: give a number from 2 to {MAX_HOSTS}")
        if not 1 <= wait <= 86_400:
            raise BadInput(f"--wait {wait:g}: give seconds, 1 to 86400")
        with contextlib.ExitStack() as stack, terminated_like_ctrl_c():
            called = name or socket.gethostname()
            gathered = _join(join, called, wait) if join else _invite(stack, hosts, listen, called, wait)
            stack.callback(gathered.endpoint.close)
            figures = _measure(gathered)
        _report(figures, json)


def _invite(stack: contextlib.ExitStack, hosts: int, listen: str, name: str, wait_s: float) -> GatheredHosts:
    from paceline.cli.bench.links.gathering import FirstHost
    from paceline.wire.dialing import is_loopback

    address = listen or _own_address()
    if address in ("0.0.0.0", "::"):
        raise BadInput(f"--listen {address} is every address of this machine; give the one that the others use")
    first = FirstHost(address, name, hosts)
    stack.callback(first.close)
    if is_loopback(address):
        typer.echo(f"{address} is a loopback address: only commands on this machine can join", err=True)
    typer.echo(
        f"on each of the other {hosts - 1} hosts, within {wait_s:.0f} s: paceline bench links --join CODE\n"
        "(other users there can see CODE in an argument; --join - reads it from stdin, --join @FILE from a file)",
        err=True,
    )
    typer.echo(first.code)
    return first.wait(wait_s, _teller(hosts))


def _join(code: str, name: str, wait_s: float) -> GatheredHosts:
    from paceline.cli.bench.links.gathering import LinksCode, gather_by_code

    text = read_code(code)
    try:
        LinksCode.decode(text)
    except ValueError as error:
        raise BadInput(f"--join: {error}") from error
    return gather_by_code(text, name, wait_s, _teller(None))


def _teller(num_hosts: int | None) -> Callable[[Sequence[str]], None]:
    """A line on stderr whenever somebody has come or gone."""
    told: list[tuple[str, ...]] = [()]

    def tell(names: Sequence[str]) -> None:
        if tuple(names) != told[0]:
            told[0] = tuple(names)
            of_all = f" of {num_hosts}" if num_hosts else ""
            typer.echo(f"{len(names)}{of_all} hosts are here: {', '.join(names)}", err=True)

    return tell


def _measure(gathered: GatheredHosts) -> LinkFigures:
    from paceline.cli.bench.links.measure import measure_links

    num_hosts = len(gathered.hosts.hosts)
    with measuring(num_hosts * (num_hosts - 1)) as tell:
        return measure_links(gathered, lambda sender, receiver: tell(f"{sender} -> {receiver}", 1))


def _report(figures: LinkFigures, json: Path | None) -> None:
    from paceline.cli.bench import machine
    from paceline.cli.bench.links import report

    console = output_console()
    for table in report.tables(figures):
        console.print(table)
    for line in report.notes(figures):
        typer.echo(line)
    if json is not None:
        head = {"benchmark": "links", "command": this_command(), "machine": machine.describe()}
        machine.write_json(json, {**head, **report.record(figures)})


def _own_address() -> str:
    """That by which this machine would reach others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError as error:
            raise BadInput(
                f"this machine has no way to others ({error.strerror}); say its address with --listen"
            ) from error
        return str(probe.getsockname()[0])
