"""What is seen of servers: apart from the workers, in the table, the JSON, the live display, the lines and the end."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import pytest

from paceline.control.journal.labels import write_started
from paceline.control.journal.reader import RunReader
from paceline.control.messages.plan import PlanStart
from paceline.watch import status
from paceline.watch.follower import Follower
from paceline.watch.lines import progress_line
from paceline.watch.look import Look, look_at
from paceline.watch.servers import in_one_line, staleness_of
from tests.watch.samples import START, Writer, writing
from tests.watch.screens import drawn, watching

WORKER, FIRST, SECOND = "aaaaaaaaaaaaaaaa", "cccccccccccccccc", "dddddddddddddddd"


def served(writer: Writer, **fields: object) -> None:
    """A worker and two servers, of which this machine started the first as s0."""
    writer.say("running")
    writer.plan(WORKER, start=PlanStart.FOUND, base=0)
    writer.member(WORKER, 0)
    writer.server(FIRST, pid=51, host=platform.node())
    writer.server(SECOND, **fields)
    write_started(Path(writer.journal.path).parent, {"s0": [50, 51], "w0": [4711]})
    writer.steps(0)


def line_of(folder: Path) -> str:
    with RunReader(folder) as reader:
        return in_one_line(look_at(reader, START).living_servers)


def test_servers_are_not_counted_as_workers(tmp_path: Path) -> None:
    with writing(tmp_path) as writer, contextlib.closing(Follower(tmp_path)) as follower:
        served(writer)
        look = follower.look()
        assert isinstance(look, Look)
        assert progress_line(look).endswith(", 1 worker, 2 servers, 1.2 M keys, 340 MB, 35% busy")


def test_the_line_of_servers(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        served(writer)
        assert line_of(tmp_path) == "2 servers, 1.2 M keys, 340 MB, 35% busy"
        writer.server(SECOND, backups=8, arriving=12, busy=0.05)
        assert line_of(tmp_path) == "2 servers, 1.2 M keys with copies, 340 MB, 20% busy, moving 12 ranges"
        writer.server(SECOND, fate="dead")
        assert line_of(tmp_path) == "1 server, 600 k keys, 170 MB, 35% busy"
        writer.server(FIRST, phase="ready", ranges=0, num_keys=0, num_bytes=0, busy=0.0)
        assert line_of(tmp_path) == "1 server"


def test_the_table_of_servers(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        served(writer, backups=4, arriving=3)
        writer.server("eeeeeeeeeeeeeeee", fate="dead", reason="killed")
        with RunReader(tmp_path) as reader:
            lines = [" ".join(line.split()) for line in drawn(reader).splitlines()]
            for width in (10, 40, 60):
                assert all(len(line) <= width for line in drawn(reader, width).splitlines())
    assert "rank worker state samples/s share host step time pid" in lines
    assert sum(WORKER[:8] in line for line in lines) == 2, "in its table and in the plan"
    assert not any(line.startswith(("- cccccccc", "- s0")) for line in lines), "not among the workers"
    at = lines.index("server state ranges keys backups memory busy host pid")
    assert lines[at + 1] == "dddddddd serving 8 (+3) 600 k 4 170 MB 35% lab-1 4712"
    assert lines[at + 2] == f"s0 serving 8 600 k 0 170 MB 35% {platform.node()} 51"
    assert lines[at + 3] == "eeeeeeee dead - - - - - lab-1 4712"


def test_what_the_json_says_of_roles(tmp_path: Path) -> None:
    with writing(tmp_path) as writer:
        served(writer)
        with RunReader(tmp_path) as reader:
            members = {member["id"]: member for member in status.as_json(reader)["members"]}
    assert (members[WORKER]["role"], members[WORKER]["serving"]) == ("worker", None)
    first = members[FIRST]
    assert (first["role"], first["label"], first["state"], first["rank"]) == ("server", "s0", "serving", None)
    assert first["serving"] == {
        "num_ranges": 8,
        "num_backups": 0,
        "num_arriving": 0,
        "num_keys": 600_000,
        "num_bytes": 170_000_000,
        "busy": 0.35,
        "staleness": {},
    }
    assert members[SECOND]["label"] is None, "it was started elsewhere"


@pytest.mark.parametrize("plain", [False, True])
def test_events_name_workers_and_servers(tmp_path: Path, plain: bool) -> None:
    with writing(tmp_path) as writer, watching(tmp_path, plain=plain) as shown:
        served(writer)
        writer.event("joined", WORKER, "process 4711 on lab-1")
        writer.event("joined", FIRST, "process 51 on lab-1")
        writer.event("placement", "", f"version 7: ranges move to {FIRST}, {SECOND}")
        writer.event("dead", SECOND, "process 4712 was killed by signal 9")
        writer.event("warning", WORKER, "out of memory")
        writer.event("hot server", "", f"{FIRST} has 1.83 times the mean load: range 3 goes to {SECOND}")
        writer.event("lost ranges", "", "3 of 16 ranges: no server that lives has them")
        shown.see("joined worker aaaaaaaa: process 4711 on lab-1")
        shown.see("joined server s0: process 51 on lab-1")
        shown.see("placement: version 7: ranges move to s0, dddddddd")
        shown.see("died server dddddddd: process 4712 was killed by signal 9")
        shown.see("warning aaaaaaaa: out of memory")
        shown.see("hot server: s0 has 1.83 times the mean load: range 3 goes to dddddddd")
        shown.see("lost ranges: 3 of 16 ranges: no server that lives has them")
        writer.server(SECOND, arriving=2)
        writer.steps(1)
        shown.see("2 servers, 1.2 M keys, 340 MB, 35% busy, moving 2 ranges")


def test_staleness_is_told_by_how_many_updates_came_between() -> None:
    assert staleness_of("5,3,0,1") == {"0": 5, "1": 3, "2-3": 0, "4-7": 1}
    assert staleness_of("") == {}
