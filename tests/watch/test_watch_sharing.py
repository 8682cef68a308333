"""Why the shares are what they are, and which hosts are crowded: in the table, the JSON and the live display."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.control.journal.journal import MemberRow
from paceline.control.journal.reader import RunReader
from paceline.watch import status
from tests.watch.samples import Writer, a_whole_run, writing
from tests.watch.screens import drawn, watching

REASON = "16:16 became 21:11: bbbbbbbbbbbbbbbb takes 61 ms for 16 samples, aaaaaaaaaaaaaaaa 32 ms for 16 samples"
SHORT = "16:16 became 21:11: bbbbbbbb takes 61 ms for 16 samples, aaaaaaaa 32 ms for 16 samples"


def crowd(writer: Writer, starved: float, count: int, fate: str = "") -> None:
    for rank in range(count):
        state = MemberRow(
            *(f"{rank:016x}", "agent", 100 + rank, "lab-7", rank, 16, "active", fate, "", 1, 1),
            samples_per_s=100.0,
            step_s=0.1,
            starved=starved,
        )
        writer.journal.record(members=[state])


def values_of(folder: Path) -> dict[str, Any]:
    with RunReader(folder) as reader:
        return status.as_json(reader)


def test_the_last_change_of_shares_is_told_however_long_ago(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        a_whole_run(writer)
        assert values_of(tmp_path)["run"]["shares"] is None
        writer.event("shares", "aaaaaaaaaaaaaaaa", "an older one")
        writer.event("shares", "aaaaaaaaaaaaaaaa", REASON)
        for number in range(30):
            writer.event("checkpoint", "", f"step-{number}")
        assert values_of(tmp_path)["run"]["shares"]["reason"] == REASON
        with RunReader(tmp_path) as reader:
            text = " ".join(drawn(reader).split())
        assert f": {SHORT}" in text
        assert "shares since" in text
        with watching(tmp_path) as shown:
            shown.see(SHORT)


def test_a_host_whose_workers_share_its_cores_is_named(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        writer.say("running")
        crowd(writer, 0.05, 2)
        assert values_of(tmp_path)["run"]["crowded"] == []
        crowd(writer, 0.45, 2)
        (said,) = values_of(tmp_path)["run"]["crowded"]
        assert said.startswith(
            "lab-7 is slow because its 2 workers share its cores: they wait 45% of the time for one;"
        )
        assert values_of(tmp_path)["members"][0]["starved"] == pytest.approx(0.45)
        with RunReader(tmp_path) as reader:
            assert "lab-7 is slow because its 2 workers share its cores" in " ".join(drawn(reader).split())
        with watching(tmp_path) as shown:
            shown.see("lab-7 is slow because its 2 workers")
        crowd(writer, 0.45, 2, fate="dead")
        crowd(writer, 0.45, 1)
        (said,) = values_of(tmp_path)["run"]["crowded"]
        assert said == "lab-7 is slow because something else uses its cores: its worker waits 45% of the time for one"
        writer.say("ended")
        assert values_of(tmp_path)["run"]["crowded"] == [], "of a run that is over it is no news"
