"""The options about shares and speeds: what is refused, and what reaches a worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.engine.running import Hosting
from paceline.engine.speeds import Capacity, parse_capacity, parse_shares
from tests.engine.commands import completed, write_script

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--capacity", "0"], "--capacity 0: give how fast this machine is"),
        (["--capacity", "-2"], "--capacity -2"),
        (["--capacity", "1e9"], "--capacity 1e9"),
        (["--capacity", "nan"], "--capacity nan"),
        (["--capacity", "fast"], "--capacity fast"),
        (["--capacity", "2", "--shares", "equal"], "--capacity 2 has no effect on fixed shares"),
        (["--drop-stragglers", "--shares", "equal"], "--drop-stragglers goes by measured speeds"),
        (["--shares", "some"], "--shares some: give auto (each worker takes what it can), equal, or"),
        (["--shares", "4"], "--shares 4:"),
        (["-n", "2", "--shares", "4:0"], "--shares 4:0"),
        (["-n", "2", "--shares", "4:-1"], "--shares 4:-1"),
        (["-n", "2", "--shares", "4:2.5"], "--shares 4:2.5"),
        (["-n", "4", "--shares", "4:2:1"], "--shares 4:2:1 is for 3 workers, but there are 4 (-n)"),
        (["-n", "2", "--shares", "1:2:3"], "--shares 1:2:3 is for 3 workers, but there are 2 (-n)"),
        (["-n", "2", "--max", "4", "--shares", "1:2:3"], "no more than 4 may take part (--max)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path: Path, options: list[str], said: str) -> None:
    script = write_script(tmp_path, "print('started')")
    code, out, err = completed(tmp_path, "run", *options, script)
    assert code == 2
    assert said in " ".join(err.split())
    assert "started" not in out
    assert not (tmp_path / "runs").exists()


def test_what_is_said_of_a_machine_reaches_its_workers(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os
        from paceline.control.shell.ticket import inherited
        print(inherited().capacity, os.environ.get("PACELINE_PROBE_S"))
        """,
    )
    for capacity, expected in (("2.5", "2.5 None"), ("probe", "0.0 1.0")):
        _, out, _ = completed(tmp_path, "run", "--restarts", "0", "--capacity", capacity, "--name", capacity, script)
        assert f"[w0] {expected}" in out


def test_shares_for_workers_that_join_later_are_asked_for_with_the_most_that_may_take_part() -> None:
    assert Hosting(workers=2, most=3, shares=(1, 2, 3)).settings().most == 3
    assert Hosting(workers=2, shares=(1, 2)).settings().most == 2
    assert Hosting(workers=2, shares=(1,)).settings().most > 2
    with pytest.raises(ValueError, match="--shares 1:2:3 is for 3 workers, but there are 2"):
        Hosting(workers=2, shares=(1, 2, 3)).settings()


def test_how_they_are_read() -> None:
    assert parse_shares("auto") == ()
    assert parse_shares("equal") == (1,)
    assert parse_shares("4:2:1") == (4, 2, 1)
    assert parse_capacity("") == Capacity()
    assert parse_capacity("0.5") == Capacity(0.5)
    assert parse_capacity("probe").environment == {"PACELINE_PROBE_S": "1.0"}
