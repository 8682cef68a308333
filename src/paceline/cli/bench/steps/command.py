"""`paceline bench SCRIPT`: runs the script on this machine, as `paceline run` does, until enough steps were recorded.

The run has a folder of its own, which is removed, and workers neither resume from nor write checkpoints elsewhere. What
they print is printed. A run that has recorded enough is asked to stop after the step under way.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.bench.app import check_output, errors_told, output_console, this_command
from paceline.cli.bench.errors import BadInput, BenchError
from paceline.cli.script import command_of

if TYPE_CHECKING:
    from paceline.engine.events import RunOutcome
    from paceline.engine.running import Hosting
    from paceline.watch.spans import Recording

SPANS_FOLDER = "spans"  # in the run's folder
_LOOK_S = 0.05
_STOP_S = 30.0


def script(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers to start here.")] = 1,
    servers: Annotated[int, typer.Option(help="How many servers, for parameters, to start here.")] = 0,
    shares: Annotated[
        str, typer.Option(metavar="auto|equal|4:2:1", help="How batches are divided: by speed, equally, fixed.")
    ] = "auto",
    skip: Annotated[int, typer.Option(help="How many steps to leave out at the beginning.")] = 20,
    steps: Annotated[int, typer.Option(help="How many steps to record after these.")] = 100,
    svg: Annotated[Path | None, typer.Option(help="Draw one step of all workers to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write every figure to this file.")] = None,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Shows where a step of a script goes, and what its limit is. `paceline bench train.py` is short for it."""
    with errors_told():
        check_output("--svg", svg)
        check_output("--json", json)
        if skip < 1:
            raise BadInput(f"--skip {skip}: give 1 or more, because a first step is like no other")
        if steps < 1:
            raise BadInput(f"--steps {steps}: give 1 or more")
        try:
            command = command_of(script, is_module=module)
            hosting = _hosting(workers, servers, shares)
        except ValueError as error:
            raise BadInput(str(error)) from error
        load = os.getloadavg()[0]
        recordings = _record(command, script[0], hosting, skip, steps)
        _report(recordings, svg, json)
        if load > 0.5 * (cores := len(os.sched_getaffinity(0))):
            typer.echo(f"note: this machine was busy before (load {load:.1f} on {cores} cores); that is in the figures")


def _hosting(workers: int, servers: int, shares: str) -> Hosting:
    from paceline.engine import speeds
    from paceline.engine.running import Hosting
    from paceline.engine.slots import AgentRules

    # A worker that died would be measured from its beginning, and all others while they wait for it.
    AgentRules(workers=workers, servers=servers, restarts=0)
    hosting = Hosting(workers=workers, fewest=workers, servers=servers, restarts=0, shares=speeds.parse_shares(shares))
    hosting.settings()
    return hosting


def _record(command: tuple[str, ...], name: str, hosting: Hosting, skip: int, num_steps: int) -> list[Recording]:
    """What each worker has recorded; `BenchError` if there is nothing."""
    import msgspec

    from paceline.engine import folders, running
    from paceline.engine.local import Job
    from paceline.engine.stores import Stores
    from paceline.watch import spans

    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paceline-bench-")))
        stores = stack.enter_context(Stores(hosting.host))
        place = stack.enter_context(contextlib.closing(folders.claim(root, "run")))
        recorded = place.folder / SPANS_FOLDER
        recorded.mkdir()
        request = spans.SpanRequest(str(recorded), skip, num_steps)
        environment = {spans.VARIABLE: msgspec.json.encode(request).decode()}
        job = Job(command=command, workers=hosting.workers, run=place.name, environment=environment)
        with running.Lifetime(place) as life, _stopped_when_done(place.folder, recorded, hosting.workers):
            outcome = life.host(hosting, running.local_engine(job, place.logs, stores.attach))
            explanation = life.explanation(outcome)
        found = spans.read(recorded)
        _check(outcome, explanation, name, found, hosting.workers)
        return found


def _check(outcome: RunOutcome, explanation: list[str], name: str, found: list[Recording], num_workers: int) -> None:
    from paceline.engine.events import RunResult

    if outcome.result is RunResult.INTERRUPTED:
        raise typer.Exit(outcome.code)
    if outcome.result not in (RunResult.ENDED, RunResult.FAILED_LATER):
        raise BenchError("\n".join([f"{name} failed, so there is nothing to show", *explanation]))
    if len(found) == num_workers:
        return
    if found:
        missing = sorted(set(range(num_workers)) - {recording.worker for recording in found})
        raise BenchError(f"worker {missing[0]} of {num_workers} recorded nothing; it ended before the others")
    raise BenchError(
        f"{name} made no paceline.Session, and its steps are those of a session; for a script on torch.distributed use "
        "torch.profiler"
    )


@contextlib.contextmanager
def _stopped_when_done(folder: Path, recorded: Path, num_workers: int) -> Iterator[None]:
    """Ask the run to stop as soon as every worker has recorded enough."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_S):
            if len(list(recorded.glob("w*.json"))) == num_workers:
                _stop(folder)
                return

    thread = threading.Thread(target=watch, name="paceline-bench", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_STOP_S)


def _stop(folder: Path) -> None:
    from paceline.control.shell import ticket as tickets
    from paceline.control.shell.client import command
    from paceline.errors import PacelineError
    from paceline.wire.deadline import Deadline

    # The run may end by itself just now.
    with contextlib.suppress(PacelineError, ValueError, OSError):
        access = tickets.read_access(folder)
        deadline = Deadline(_STOP_S, "asking the run to stop")
        command(access.ticket, "halt", "enough steps were recorded", answer_type=bool, deadline=deadline)


def _report(recordings: list[Recording], svg: Path | None, json: Path | None) -> None:
    from paceline.cli.bench import machine
    from paceline.cli.bench.steps import report
    from paceline.cli.bench.steps.analysis import analyse
    from paceline.cli.bench.steps.findings import find

    analysis = analyse(recordings)
    findings = find(analysis, len(os.sched_getaffinity(0)))
    console = output_console()
    console.print(report.table(analysis))
    console.print(report.picture(analysis.example), highlight=False)
    for line in report.lines(findings):
        typer.echo(line)
    if svg is not None:
        svg.write_text(report.svg(analysis.example), encoding="utf-8")
    if json is not None:
        head = {"benchmark": "steps", "command": this_command(), "machine": machine.describe()}
        machine.write_json(json, {**head, **report.record(analysis, findings)})
