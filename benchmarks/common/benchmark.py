"""A benchmark as a command: its options, their quick values, and what happens at the end.

    BENCHMARK = Benchmark(
        __doc__, "steps", measure, targets=[...],
        options=[Option("--rounds", 15, quick=1)],
    )

    if __name__ == "__main__":
        BENCHMARK.main()

`measure(options)` does the work and returns its `Found`. Then tables are printed, each target is judged, and the
record is written with the machine's description to benchmarks/results, or where --json says. With --quick the options
that were not given have their smallest useful values, and nothing is kept unless --json asks for it.

Exit codes: 0 when it measured, whatever became of the targets; `SKIPPED` where this machine lacks what it needs.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table

from benchmarks.common.targets import Record, Target, judge, verdicts
from paceline.cli.bench import machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
SKIPPED = 77  # what automake takes for a test that cannot be run here

_WIDTH = 150


class Skipped(Exception):
    """This machine lacks something; the message says what, and how to get it."""


class Found(NamedTuple):
    """`record` is what is kept, `tables` what is printed."""

    record: Record
    tables: Sequence[Table | str]


@dataclass(frozen=True)
class Option:
    """`default` has the type of the option: a number, a text, a bool for a flag, a list for several; `kind` where it is
    None. `quick` takes its place with --quick."""

    flag: str
    default: Any
    quick: Any
    help: str = ""
    choices: Sequence[str] | None = None
    kind: Callable[[str], Any] = Path

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        # No default here: what was not given is filled in when it is known whether this is a quick run.
        shown = "" if self.default is None else f" (default {_shown(self.default)}, quick {_shown(self.quick)})"
        text = f"{self.help}{shown}".strip().replace("%", "%%")
        if isinstance(self.default, bool):
            parser.add_argument(self.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif isinstance(self.default, list):
            each = type(self.default[0])
            parser.add_argument(self.flag, nargs="+", type=each, choices=self.choices, default=None, help=text)
        else:
            kind = self.kind if self.default is None else type(self.default)
            parser.add_argument(self.flag, type=kind, choices=self.choices, default=None, help=text)


@dataclass(frozen=True)
class Benchmark:
    """`result` names the JSON file where that depends on the options; else it is the name. `check` says what is wrong
    with the options, before anything starts."""

    about: str | None
    name: str
    measure: Callable[[argparse.Namespace], Found]
    targets: Sequence[Target] = ()
    options: Sequence[Option] = ()
    result: Callable[[argparse.Namespace], str] | None = None
    check: Callable[[argparse.Namespace], str] = field(default=lambda options: "")

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name.replace('-', '_')}",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in self.options:
            option.add_to(parser)
        parser.add_argument("--quick", action="store_true", help="the smallest form; its figures say little")
        parser.add_argument("--json", type=Path, help="for the figures (default in benchmarks/results; quick: nowhere)")
        options = parser.parse_args(arguments)
        for option in self.options:
            if getattr(options, option.name) is None:
                setattr(options, option.name, option.quick if options.quick else option.default)
        if complaint := self.check(options):
            parser.error(complaint)
        if options.json is None and not options.quick:
            options.json = RESULTS / f"{self.result(options) if self.result else self.name}.json"
        return options

    def main(self) -> None:
        options = self.parse()
        signal.signal(signal.SIGTERM, _leave)  # so that nothing is left behind then either
        described = machine.describe()
        try:
            found = self.measure(options)
        except Skipped as reason:
            print(f"{self.name} is skipped: {reason}", flush=True)
            sys.exit(SKIPPED)
        console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        for table in found.tables:
            console.print(table)
        judged = judge(self.targets, found.record)
        for line in verdicts(judged, quick=options.quick):
            print(line, flush=True)
        if options.json is not None:
            command = shlex.join(["python", "-m", f"benchmarks.{self.name.replace('-', '_')}", *sys.argv[1:]])
            head = {"benchmark": self.name, "command": command, "machine": described}
            options.json.parent.mkdir(parents=True, exist_ok=True)
            machine.write_json(options.json, {**head, **found.record, "targets": judged})


def _leave(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _shown(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
