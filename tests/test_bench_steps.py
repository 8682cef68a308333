"""`paceline bench SCRIPT`: what is made of spans, on spans that were made up."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
from rich.console import Console
from typer.testing import CliRunner

from paceline.cli.bench.errors import BenchError
from paceline.cli.bench.steps import report
from paceline.cli.bench.steps.analysis import WAITING, StepAnalysis, analyse, cut, with_waiting
from paceline.cli.bench.steps.findings import find
from paceline.cli.main import app
from paceline.watch.spans import Recording

FACTS: dict[str, str | int | bool] = {
    "strategy": "allreduce",
    "is_leased": False,
    "global_batch": 64,
    "parameter_bytes": 4_000_000,
    "optimizers": "AdamW",
    "can_be_fused": True,
    "loader_workers": 0,
    "threads": 1,
}
LEASED: dict[str, str | int | bool] = {"is_leased": True, "strategy": "server"}
MS = 1_000_000
# A step of ten milliseconds.
STEP = (("data", 1), ("script", 0), ("forward", 2), ("backward", 3), ("reduce", 1), ("header", 1), ("optimizer", 1))


def recorded(
    worker: int,
    steps: Sequence[Sequence[tuple[str, float]]],
    *,
    body: float = 1.0,
    numbers: Sequence[int] | None = None,
    facts: Mapping[str, str | int | bool] = {},
) -> Recording:
    """Steps of these parts in milliseconds, each followed by the body of the loop; from the middle of another step."""
    kinds, times, begun, now = ["optimizer", "script"], [0, MS], list[tuple[int, int]](), 2 * MS
    for number, parts in zip(numbers or range(1, len(steps) + 1), steps, strict=True):
        for kind, duration in (*parts, ("script", body)):
            if kind == "forward":
                begun.append((len(kinds), number))
            kinds.append(kind)
            times.append(now)
            now += round(duration * MS)
    # The step after these ends the recording.
    kinds.append("data")
    times += [now, now + MS]
    return Recording(worker, {**FACTS, **facts}, cast(Any, kinds), times, begun)


def changed(**durations: float) -> list[tuple[str, float]]:
    return [(kind, durations.get(kind, duration)) for kind, duration in STEP]


def texts(analysis: StepAnalysis, cores: int = 8) -> list[str]:
    return [finding.text for finding in find(analysis, cores)]


def test_a_step_goes_from_body_to_body() -> None:
    steps = cut(recorded(0, [STEP] * 6))
    assert list(steps) == [1, 2, 3, 4, 5, 6]
    for step in steps.values():
        assert step.duration == 10 * MS
        assert [part.kind for part in step.parts] == [*(kind for kind, _ in STEP), "script"]
        assert all(part.stop == later.start for part, later in zip(step.parts, step.parts[1:], strict=False))


def test_a_step_that_was_done_again_or_is_not_whole_is_left_out() -> None:
    again = [*STEP[:4], ("session", 1), *STEP[2:]]
    assert list(cut(recorded(0, [STEP, again, STEP]))) == [1, 3]
    whole = recorded(0, [STEP] * 3)
    ended_in_body = Recording(0, whole.facts, whole.kinds[:-1], whole.times[:-1], whole.steps)
    assert list(cut(ended_in_body)) == [1, 2]


def test_parts_add_up_and_both_ends_are_left_out() -> None:
    steps = [STEP] * 10 + [changed(forward=500.0)] + [changed(forward=0.0)] + [STEP] * 8
    found = analyse([recorded(0, steps)])
    assert found.num_steps == 16
    (times,) = found.workers
    assert times.step_s == pytest.approx(0.010)
    assert sum(times.by_kind.values()) == pytest.approx(times.step_s)
    assert times.by_kind["backward"] == pytest.approx(0.003)
    assert times.part("forward", "backward") == pytest.approx(0.5)


def test_who_comes_first_waits_for_the_last() -> None:
    late = changed(backward=7.0)
    early = [(kind, 5.0 if kind == "reduce" else duration) for kind, duration in STEP]
    found = analyse([recorded(0, [late] * 10), recorded(1, [early] * 10)])
    slow, fast = found.workers
    assert slow.awaited == {}
    assert fast.awaited == {0: pytest.approx(0.004)}
    assert fast.by_kind[WAITING] == pytest.approx(0.004)
    assert fast.by_kind["reduce"] == pytest.approx(0.001), "what is left is the work of reducing"
    assert slow.by_kind["reduce"] == pytest.approx(0.001)
    assert sum(fast.by_kind.values()) == pytest.approx(fast.step_s) == pytest.approx(slow.step_s)
    (text,) = [text for text in texts(found) if "waits" in text]
    assert text.startswith("worker 1 waits 29% of a step for worker 0, which takes 4.00 ms longer for backward")


def test_waiting_never_exceeds_the_meeting() -> None:
    """A clock that is a little off, or a reduction that did not need everybody, must not make time out of nothing."""
    one = cut(recorded(0, [STEP] * 2))[1]
    other = cut(recorded(1, [changed(data=30.0)] * 2))[1]
    early, late = with_waiting([one, other])
    assert [part.kind for part in late.parts] == [part.kind for part in other.parts]
    assert early.duration == one.duration
    assert {part.awaited for part in early.parts if part.kind == WAITING} == {1}
    assert sum(part.duration for part in early.parts if part.kind == WAITING) == 2 * MS


def test_steps_count_that_all_workers_have() -> None:
    found = analyse([recorded(0, [STEP] * 8), recorded(1, [STEP] * 8, numbers=range(3, 11))])
    assert found.num_steps == 6
    assert len({step.number for step in found.example}) == 1
    with pytest.raises(BenchError, match="only 4 whole steps were recorded, at least 5 are needed"):
        analyse([recorded(0, [STEP] * 8), recorded(1, [STEP] * 8, numbers=range(5, 13))])


def test_leases_have_nothing_in_common() -> None:
    parts = (("leases", 1), ("script", 0), ("data", 1), ("script", 0), ("forward", 2), ("backward", 1), ("servers", 4))
    found = analyse(
        [
            recorded(0, [parts] * 8, facts=LEASED),
            recorded(1, [parts] * 6, numbers=range(20, 26), facts=LEASED),
        ]
    )
    assert [times.awaited for times in found.workers] == [{}, {}]
    assert texts(found)[0].startswith("servers take 40% of a step")
    assert not any("async" in text for text in texts(found))


@pytest.mark.parametrize(
    ("durations", "facts", "says"),
    [
        ({"optimizer": 20.0}, {}, "the optimizer takes 69% of a step; AdamW(..., fused=True)"),
        ({"optimizer": 20.0}, {"can_be_fused": False}, "the optimizer takes 69% of a step"),
        ({"data": 20.0}, {}, "the batch takes 69% of a step; loader=LoaderOptions(num_workers=2)"),
        ({"data": 20.0}, {"loader_workers": 4}, "the batch takes 69% of a step; loader=LoaderOptions(num_workers=8)"),
        ({"reduce": 20.0}, {}, "reducing 4 MB of gradients takes 72% of a step"),
        ({"forward": 20.0}, {}, "forward and backward take 82% of a step"),
        ({"forward": 20.0}, {"threads": 16}, "16 threads of all workers share 8 cores"),
    ],
)
def test_the_limit_is_what_takes_most(
    durations: dict[str, float], facts: dict[str, str | int | bool], says: str
) -> None:
    found = analyse([recorded(0, [changed(**durations)] * 6, facts=facts)])
    assert says in texts(found)[0]
    assert report.lines(find(found, 8))[0] == f"the limit: {texts(found)[0]}"


def test_a_loop_with_a_long_body_is_told_so() -> None:
    found = analyse([recorded(0, [STEP] * 6, body=30.0)])
    assert texts(found)[0].startswith("the body of the loop, around session.step, takes 77%")


def test_where_nothing_stands_out() -> None:
    others = ("copy", "statistics", "reduce", "header", "servers", "optimizer", "session", "leases")
    found = analyse([recorded(0, [[(kind, 1.0) for kind in ("data", "forward", "backward", *others)]] * 6)])
    assert report.lines(find(found, 8)) == ["nothing stands out: no part takes much more than the others"]


def test_what_is_printed_and_drawn() -> None:
    late = changed(backward=7.0)
    early = [(kind, 5.0 if kind == "reduce" else duration) for kind, duration in STEP]
    found = analyse([recorded(0, [late] * 10), recorded(1, [early] * 10)])
    console = Console(width=180, record=True)
    console.print(report.table(found))
    console.print(report.picture(found.example))
    text = console.export_text()
    assert "waiting for others" in text
    assert "for worker 0" in text
    rows = {line.split()[1]: line.split()[2] for line in text.splitlines() if line.startswith("worker ")}
    assert [letter for letter, _ in itertools.groupby(rows["0"])] == list("dfbrhox")
    assert rows["0"].count("b") == pytest.approx(7 / 14 * 100, abs=1)
    assert rows["1"].count(".") == pytest.approx(4 / 14 * 100, abs=1)
    drawn = ElementTree.fromstring(report.svg(found.example))
    titles = [element.text for element in drawn.iter("{http://www.w3.org/2000/svg}title")]
    assert "waiting for others (worker 0): 4.000 ms" in titles
    kept = report.record(found, find(found, 8))
    assert kept["workers"][1]["waiting_for_s"] == {"0": pytest.approx(0.004)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py"], "nowhere.py: there is no such file"),
        (["-n", "0", __file__], "-n 0: a run needs at least one worker"),
        (["--skip", "0", __file__], "--skip 0: give 1 or more"),
        (["--steps", "0", __file__], "--steps 0: give 1 or more"),
        (["--shares", "none", __file__], "none"),
        (["--svg", "/nowhere/step.svg", __file__], "there is no folder /nowhere"),
        (["-m", "no_such_module"], "there is no such module"),
    ],
)
def test_bad_input_is_told_before_anything_is_started(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert says in result.output


def test_other_benchmarks_are_found_by_their_names() -> None:
    for command in ("allreduce", "links", "script"):
        result = CliRunner().invoke(app, ["bench", command, "--help"])
        assert result.exit_code == 0
        assert f"bench {command}" in result.output
