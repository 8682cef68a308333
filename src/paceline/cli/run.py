"""`paceline run`: a script on this machine, with as many workers as wanted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.leaving import BAD_INPUT, leave
from paceline.cli.script import command_of
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.engine.running import Hosting

# Options end at the script: everything after it is the script's own.
SCRIPT_SETTINGS = {"allow_interspersed_args": False}

ServersOption = Annotated[int, typer.Option("--servers", help="How many servers, for parameters, to start here.")]
CapacityOption = Annotated[
    str,
    typer.Option(metavar="NUMBER|probe", help="How fast this machine is beside others.", show_default="as measured"),
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Exit with 3 if a worker failed for good, though the run ended without it.")
]
FolderOption = Annotated[Path, typer.Option("--folder", help="Where the folders of runs are.")]


def run(
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments.")],
    workers: Annotated[int, typer.Option("-n", "--workers", help="How many workers to start here.")] = 1,
    fewest: Annotated[int, typer.Option("--min", help="Start with as few as this, if no more come.")] = 1,
    most: Annotated[int | None, typer.Option("--max", help="Take no more than this, also of those that join.")] = None,
    name: Annotated[str, typer.Option(help="The run's name.", show_default="script and time")] = "",
    folder: FolderOption = Path("runs"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with this run, or with the newest.")] = False,
    listen: Annotated[
        str, typer.Option(metavar="ADDRESS", help="This machine's address, for others to join by.")
    ] = "127.0.0.1",
    restarts: Annotated[int, typer.Option(help="How often a process that died is started again.")] = 3,
    strict: StrictOption = False,
    shares: Annotated[
        str, typer.Option(metavar="auto|equal|4:2:1", help="How batches are divided: by speed, equally, fixed.")
    ] = "auto",
    capacity: CapacityOption = "",
    drop_stragglers: Annotated[
        bool, typer.Option("--drop-stragglers", help="Let a worker go that costs more than it gives.")
    ] = False,
    servers: ServersOption = 0,
    replicas: Annotated[int, typer.Option(help="On how many servers each parameter is.")] = 1,
    ranges: Annotated[
        str, typer.Option(metavar="auto|fixed", help="How servers divide parameters: by load, or by capacity alone.")
    ] = "auto",
    backend: Annotated[
        str, typer.Option(metavar="paceline", help="What scripts get that ask torch.distributed for gloo, or for none.")
    ] = "",
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a live display.")] = False,
    module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
) -> None:
    """Trains a script with several workers on this machine; others may join."""
    try:
        command = command_of(script, is_module=module)
        hosting = _hosting(
            *(workers, fewest, most, listen, restarts),
            strict=strict,
            shares=shares,
            capacity=capacity,
            drop_stragglers=drop_stragglers,
            servers=servers,
            replicas=replicas,
            ranges=ranges,
        )
        code = _run(
            command,
            hosting,
            name=name,
            root=folder,
            stem=script[0].rpartition(".")[2] if module else Path(script[0]).stem,
            resume=resume,
            plain=plain,
            backend=backend,
            script=["-m", *script] if module else script,
        )
    except (PacelineError, ValueError, OSError) as error:
        leave(error, BAD_INPUT)
    raise typer.Exit(code)


def _hosting(
    workers: int,
    fewest: int,
    most: int | None,
    listen: str,
    restarts: int,
    *,
    strict: bool,
    shares: str,
    capacity: str,
    drop_stragglers: bool,
    servers: int,
    replicas: int,
    ranges: str,
) -> Hosting:
    from paceline.engine import speeds
    from paceline.engine.running import Hosting
    from paceline.engine.slots import AgentRules

    if listen in ("0.0.0.0", "::", ""):
        raise ValueError(f"--listen {listen} is every address of this machine; give the one that the others use")
    AgentRules(workers=workers, servers=servers, restarts=restarts)
    if capacity and shares != speeds.AUTO:
        raise ValueError(f"--capacity {capacity} has no effect on fixed shares (--shares {shares}); leave out either")
    limit = {} if most is None else {"most": most}
    hosting = Hosting(
        workers=workers,
        fewest=fewest,
        host=listen,
        restarts=restarts,
        strict=strict,
        shares=speeds.parse_shares(shares),
        drop_stragglers=drop_stragglers,
        capacity=speeds.parse_capacity(capacity),
        servers=servers,
        replicas=replicas,
        by_load=speeds.parse_ranges(ranges),
        **limit,
    )
    hosting.settings()
    return hosting


def _run(
    command: tuple[str, ...],
    hosting: Hosting,
    *,
    name: str,
    root: Path,
    stem: str,
    resume: bool,
    plain: bool,
    backend: str,
    script: list[str],
) -> int:
    from paceline.engine import folders, running
    from paceline.engine.local import Job
    from paceline.engine.stores import Stores, check_backend

    check_backend(backend)
    if not name:
        name = folders.newest(root) if resume else folders.new_name(root, stem)
    with contextlib.ExitStack() as stack:
        # It listens on the address that was given: where that is not of this machine, no folder is made.
        stores = stack.enter_context(Stores(hosting.host, backend))
        place = stack.enter_context(contextlib.closing(folders.claim(root, name, resume=resume)))
        here = ["--folder", str(place.folder.parent), "--name", name, "--listen", hosting.host]
        servers = ["--servers", str(hosting.servers), "--replicas", str(hosting.replicas)] if hosting.servers else []
        resume_words = ["paceline", "run", "--resume", *here, "-n", str(hosting.workers), *servers, *script]
        if resume:
            folders.reopen(place.folder)
        display = running.Display(place.folder, plain=plain)
        job = Job(command=command, workers=hosting.workers, run=name, environment=hosting.capacity.environment)
        with running.Lifetime(place, display) as life:
            outcome = life.host(hosting, running.local_engine(job, place.logs, stores.attach))
            explanation = life.explanation(outcome)
            shortfall = life.shortfall()
        stopped = running.why_stopped(outcome, place)
        running.report(outcome, explanation, place, resume_words, shortfall, stopped)
        return running.code_of(outcome, shortfall)
