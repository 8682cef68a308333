"""`paceline bench links`: how hosts find each other, what is made of the figures, and three hosts, one of them slow."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest
from typer.testing import CliRunner

from paceline.cli.bench.links import gathering, report
from paceline.cli.bench.links.gathering import FirstHost, LinksCode, gather_by_code
from paceline.cli.bench.links.measure import LinkFigures
from paceline.cli.main import app
from paceline.errors import AddressError, CallFailed, DeadlineExceeded
from paceline.testing import netlab
from paceline.testing.netlab import Host, Netlab

pytestmark = pytest.mark.timeout(60)


def silent(names: Sequence[str]) -> None:
    pass


# -- how hosts find each other -----------------------------------------------------------------------------------------


@pytest.fixture
def first() -> Iterator[FirstHost]:
    with closing(FirstHost("127.0.0.1", "first", 3)) as host:
        yield host


def test_all_hosts_come_to_the_same_order(first: FirstHost) -> None:
    with ThreadPoolExecutor(2) as pool:
        others = [pool.submit(gather_by_code, first.code, name, 30.0, silent) for name in ("same", "same")]
        found = [first.wait(30.0, silent), *(other.result(30.0) for other in others)]
    for other in found[1:]:
        other.endpoint.close()
    assert sorted(host.rank for host in found) == [0, 1, 2]
    assert len({host.hosts.names for host in found}) == 1
    assert len(set(found[0].hosts.names)) == 3, "hosts of one name are told apart"
    assert found[0].hosts.names[0] == "first"


def test_a_host_that_hangs_up_is_forgotten_and_its_place_is_free(first: FirstHost) -> None:
    came, left = threading.Event(), threading.Event()

    def watch(names: Sequence[str]) -> None:
        if "fleeting" in names:
            came.set()
        elif came.is_set():
            left.set()

    class Tired(Exception):
        pass

    def give_up(names: Sequence[str]) -> None:
        if came.wait(20.0):
            raise Tired

    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(first.wait, 40.0, watch)
        with pytest.raises(Tired):
            gather_by_code(first.code, "fleeting", 30.0, give_up)
        assert left.wait(20.0)
        later = [pool.submit(gather_by_code, first.code, "b", 30.0, silent)]
        later_here = gather_by_code(first.code, "c", 30.0, silent)
        for other in (later[0].result(30.0), later_here):
            other.endpoint.close()
        assert set(waiting.result(30.0).hosts.names) == {"first", "b", "c"}


def test_hosts_that_do_not_come_are_given_up(first: FirstHost) -> None:
    with pytest.raises(DeadlineExceeded, match="2 more hosts; on each: paceline bench links --join CODE"):
        first.wait(0.2, silent)


def test_one_host_too_many_is_told() -> None:
    with closing(FirstHost("127.0.0.1", "first", 2)) as first, ThreadPoolExecutor(1) as pool:
        second = pool.submit(gather_by_code, first.code, "second", 30.0, silent)
        first.wait(30.0, silent)
        second.result(30.0).endpoint.close()
        with pytest.raises(CallFailed, match="all 2 hosts are there"):
            gather_by_code(first.code, "third", 30.0, silent)


def test_a_code_that_leads_to_nobody_is_told() -> None:
    first = FirstHost("127.0.0.1", "first", 2)
    first.close()
    with pytest.raises(AddressError, match="does the first host still wait"):
        gather_by_code(first.code, "late", 5.0, silent)


def test_who_knows_the_address_but_not_the_secret_stays_outside(first: FirstHost) -> None:
    code = LinksCode.decode(first.code)
    wrong = LinksCode(code.address, bytes(32), code.fingerprint, code.tls).encode()
    with pytest.raises(Exception, match="secret"):
        gather_by_code(wrong, "stranger", 5.0, silent)


def test_names_of_other_hosts_are_fit_for_a_terminal() -> None:
    assert gathering.printable("a\x1b[31mb\n") == "a[31mb"
    assert gathering.printable("\x00") == "unnamed"
    assert len(gathering.printable("x" * 500)) == gathering.MAX_NAME


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--hosts", "1"], "--hosts 1"),
        (["--wait", "0"], "--wait 0"),
        (["--listen", "0.0.0.0"], "every address of this machine"),
        (["--join", "paceline-join1:abc"], "it does not start with paceline-links1:"),
        (["--join", "paceline-links1:abcd"], "cut or changed"),
        (["--json", "/nonexistent/folder/out.json"], "there is no folder"),
    ],
)
def test_bad_input_is_one_line_and_code_2(options: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["bench", "links", *options])
    assert done.exit_code == 2
    assert complaint in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- what is made of the figures ---------------------------------------------------------------------------------------


def figures_of(mb_per_s: dict[str, float], latency_ms: dict[str, float], names: str = "abc") -> LinkFigures:
    """By "ab" for the link from a to b; 100 MB/s and 0.1 ms where nothing is said."""

    def square(given: dict[str, float], usual: float) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(0.0 if a == b else given.get(a + b, usual) for b in names) for a in names)

    return LinkFigures(tuple(names), square(latency_ms, 0.1), square(mb_per_s, 100.0), ())


def test_no_link_is_slow_where_all_are_alike() -> None:
    assert report.notes(figures_of({"ab": 80.0}, {"ab": 0.2})) == ["no link is much slower than the others"]


def test_a_slow_link_is_named_with_its_direction() -> None:
    lines = report.notes(figures_of({"ab": 10.0}, {}))
    assert lines[0] == "slow: a -> b, 10.0 MB/s, 0.10 of the fastest link"
    assert report.slow_links(figures_of({"ab": 10.0}, {})) == [(0, 1)]


def test_a_host_whose_links_are_all_slow_is_named_once() -> None:
    slow = {a + b: 2.5 for a, b in itertools.permutations("abc", 2) if "c" in (a, b)}
    lines = report.notes(figures_of(slow, {}))
    assert lines[0] == "slow: every link of c, 2.50 MB/s, 0.03 of the fastest link"
    assert not any("->" in line for line in lines)


def test_a_far_host_is_named() -> None:
    assert report.far_links(figures_of({}, {"ac": 30.0, "ca": 31.0, "ab": 0.9})) == [(0, 2), (2, 0)]
    assert any(line.startswith("far: a -> c, 30.0 ms") for line in report.notes(figures_of({}, {"ac": 30.0})))


# -- three hosts -------------------------------------------------------------------------------------------------------


def paceline(host: Host, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline", "bench", "links", *arguments]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return host.popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True, **pipes)


def line_of(stream: IO[str] | None) -> str:
    assert stream is not None
    return stream.readline()


@pytest.mark.timeout(110)
@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")
def test_three_hosts_print_the_same_table_and_name_the_slow_one(tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    with Netlab(3, rate="1gbit") as lab:
        lab.hosts[2].set_rate("20mbit")
        address = lab.hosts[0].address
        first = paceline(lab.hosts[0], "--hosts", "3", "--listen", address, "--name", "a", "--json", str(path))
        code = line_of(first.stdout)
        others = [
            paceline(host, "--join", "-", "--name", name) for host, name in zip(lab.hosts[1:], ("b", "c"), strict=True)
        ]
        for other in others:
            assert other.stdin is not None
            other.stdin.write(code)
            other.stdin.flush()
        printed = [other.communicate(timeout=90)[0] for other in others]
        printed.append(first.communicate(timeout=30)[0])
        assert [process.returncode for process in (first, *others)] == [0, 0, 0]
    assert code.startswith("paceline-links1:")
    assert len(set(printed)) == 1, printed
    assert "slow: every link of c, 2." in printed[0]
    read = json.loads(path.read_text())
    assert {tuple(pair) for pair in read["slow"]} == {pair for pair in itertools.permutations("abc", 2) if "c" in pair}
    assert [choice["algorithm"] in ("ring", "tree") for choice in read["choices"]] == [True] * 5
    assert all(read["latency_ms"][a][b] > 0 for a, b in itertools.permutations(range(3), 2))
