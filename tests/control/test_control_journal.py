"""The run's database and folder."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from paceline.control.journal.folder import LOCK_FILE, FolderLock, FolderRefused, prepare, refuse_network, type_of_mount
from paceline.control.journal.journal import Happening, Journal, JournalError, MemberRow
from paceline.control.journal.reader import RunReader
from paceline.control.leases.lease_set import LeaseSet
from paceline.control.leases.messages import LeaseReport, rows_of_begun
from paceline.control.messages.plan import Plan, PlanStart, Seat
from paceline.control.messages.progress import MetricRow, StepRow
from paceline.testing.eventually import eventually
from paceline.testing.faults import fill
from paceline.watch.audit import audit
from paceline.watch.history import standing_steps
from paceline.wire.identity import Identity
from tests.control.helpers import card_of

MOUNTS = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:25 / /home rw,relatime shared:2 - nfs4 server:/export/home rw,vers=4.2
31 22 0:26 / /home/me/local rw - xfs /dev/vdb rw
32 22 0:27 / /mnt/my\040share rw - cifs //server/share rw
33 22 0:28 / /scratch rw - lustre 10.0.0.1@tcp:/scratch rw
34 22 0:29 / /sshfs rw shared:9 master:1 - fuse.sshfs me@host: rw
35 22 0:30 / /over rw - nfs server:/over rw
36 35 0:31 / /over rw - tmpfs tmpfs rw
"""


def step(operation: int, generation: int, loss: float = 1.0) -> StepRow:
    return StepRow(operation, generation, 0, operation * 8, 8, loss, 0.1)


def plan(generation: int, start: PlanStart, base: int = 0) -> Plan:
    return Plan(generation, start, (Seat(card_of(Identity("m1")), 1), Seat(card_of(Identity("m2")), 3)), base)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/run", "ext4"),
        ("/home/me/run", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/run", "ext4"),
        ("/home/me/local/run", "xfs"),
        ("/mnt/my share/run", "cifs"),
        ("/over/run", "tmpfs"),
    ],
)
def test_the_mount_of_a_path(path: str, kind: str) -> None:
    assert type_of_mount(path, MOUNTS) == kind


@pytest.mark.parametrize("path", ["/home/me/run", "/mnt/my share/run", "/scratch/x", "/sshfs"])
def test_network_file_systems_are_refused_with_a_remedy(path: str) -> None:
    with pytest.raises(FolderRefused, match=r"network file system .*give a folder on a disk of this machine"):
        refuse_network(path, MOUNTS)


@pytest.mark.parametrize("path", ["/data/run", "/home/me/local", "/over/run"])
def test_local_ones_are_not(path: str) -> None:
    refuse_network(path, MOUNTS)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderRefused, match="give another one"):
        prepare(tmp_path / "file" / "run")


def test_a_folder_has_one_coordinator(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    with pytest.raises(FolderRefused, match=f"process {os.getpid()};"):
        FolderLock(tmp_path)
    first.close()
    FolderLock(tmp_path).close()
    assert (tmp_path / LOCK_FILE).exists()


def test_what_is_committed_is_there_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit({"a": b"1", "b": b"\x00\xff"}, [Happening(1, "joined", "m1", "hello")], [plan(1, PlanStart.FOUND)])
    journal.commit({"a": None, "c": b"3"})
    # Not closed: as after kill -9.
    again = Journal(tmp_path)
    assert again.remembered() == {"b": b"\x00\xff", "c": b"3"}
    with RunReader(tmp_path) as reader:
        (event,) = reader.events()
        assert (event.term, event.kind, event.member, event.text) == (1, "joined", "m1", "hello")
        (row,) = reader.plans()
        assert (row.generation, row.start, row.members, row.shares) == (1, "found", ("m1", "m2"), (1, 3))
    again.close()
    journal.close()


def test_a_batch_is_all_or_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit({"a": b"1"})
    with pytest.raises(JournalError, match=r"cannot be written.*Make room"):
        journal.commit({"a": b"2", "b": object()})  # type: ignore[dict-item]
    assert journal.remembered() == {"a": b"1"}
    journal.commit({"a": b"3"})
    assert journal.remembered() == {"a": b"3"}
    journal.close()


def test_only_a_new_founding_does_an_operation_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.reached() == (0, -1, -1)
    journal.commit({}, plans=[plan(1, PlanStart.FOUND), plan(2, PlanStart.RECOVER, 2)])
    journal.record([step(n, 1) for n in (1, 2, 3)], [MetricRow(2, "accuracy", 0.5)])
    journal.record([step(3, 2), step(4, 2)])  # another main, which caught up with 3 in generation 2
    assert journal.reached() == (1, 4, 2)
    journal.commit({}, plans=[plan(3, PlanStart.FOUND, 2)])
    assert journal.reached() == (3, 2, 2)
    journal.record([step(3, 3, loss=0.25), step(4, 2, loss=9.0)])  # the last one is late: it was undone
    journal.close()
    journal = Journal(tmp_path)
    assert journal.reached() == (3, 3, 2)
    with RunReader(tmp_path) as reader:
        assert [(row.operation, row.times_done, row.loss) for row in reader.steps()] == [
            (1, 1, 1.0),
            (2, 1, 1.0),
            (3, 2, 0.25),
            (4, 1, 9.0),
        ]
        assert [(row.operation, row.name, row.value) for row in reader.metrics()] == [(2, "accuracy", 0.5)]
    journal.close()


def test_members_keep_the_time_they_joined(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    state = MemberRow("m1", "agent", 7, "here", 0, 1, "ready", "", "", 0, -1, 0.0, 0.0)
    journal.record(members=[state], run={"name": "a run", "started": "5.5", "fact/batch": "32"})
    with RunReader(tmp_path) as reader:
        (before,) = reader.members()
        journal.record(members=[msgspec.structs.replace(state, phase="active", samples_per_s=100.0)])
        (after,) = reader.members()
        assert (after.joined, after.phase, after.samples_per_s) == (before.joined, "active", 100.0)
        status = reader.status()
        assert (status.name, status.started, status.facts) == ("a run", 5.5, {"batch": "32"})
    journal.close()


def test_members_have_a_role_and_servers_what_they_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    worker = MemberRow("m1", "agent", 7, "here", 0, 1, "active", "", "", 1, 5)
    server = MemberRow("s1", "agent", 8, "here", -1, 0, "ready", "", "", 0, -1, role="server")
    journal.commit({}, [Happening(1, "joined", "s1", "process 8 on here")], members=[server])
    with RunReader(tmp_path) as reader:
        (row,) = reader.members()
        assert (row.member, row.is_server, row.ranges) == ("s1", True, 0)
        holding = msgspec.structs.replace(server, ranges=5, backups=4, arriving=3, num_keys=2, num_bytes=1, busy=0.5)
        journal.record(members=[worker, holding])
        rows = {row.member: row for row in reader.members()}
        assert not rows["m1"].is_server
        now = rows["s1"]
        assert (now.ranges, now.backups, now.arriving, now.num_keys, now.num_bytes, now.busy) == (5, 4, 3, 2, 1, 0.5)
        assert now.joined == row.joined
    journal.close()


def test_a_loss_that_is_no_number_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.record([step(1, 1, float("nan")), step(2, 1, float("inf"))])
    with RunReader(tmp_path) as reader:
        assert [row.loss for row in reader.steps()] == [None, float("inf")]
    journal.close()


def test_another_version_is_refused_by_both(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with sqlite3.connect(tmp_path / "run.db") as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    for opener in (Journal, RunReader):
        with pytest.raises(JournalError, match="version 99"):
            opener(tmp_path)


def test_a_damaged_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.db").write_bytes(b"not a database" * 100)
    for opener in (Journal, RunReader):
        with pytest.raises(JournalError, match=r"run\.db cannot be"):
            opener(tmp_path)


def test_there_is_nothing_to_read_before_the_first_run(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="there is no run in"):
        RunReader(tmp_path)


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    Journal(tmp_path).close()
    with RunReader(tmp_path) as reader, pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader._database.execute("DELETE FROM run")


@pytest.fixture
def small_disk(mount_small: Callable[[str], Path], request: pytest.FixtureRequest) -> Path:
    return mount_small(getattr(request, "param", "512k"))


@pytest.mark.parametrize("small_disk", ["8m"], indirect=True)
def test_what_must_be_remembered_goes_on_where_the_disk_is_full(small_disk: Path) -> None:
    journal = Journal(small_disk)
    journal.commit({"plan": b"0"}, plans=[plan(1, PlanStart.FOUND)])
    filler = fill(small_disk / "filler")
    for number in range(2000):
        journal.commit({"plan": str(number).encode()}, [Happening(1, "plan", "m", "x" * 100)])
    with pytest.raises(JournalError, match=r"takes only what must be remembered.*0 bytes are free"):
        journal.record([StepRow(1, 1, 0, 0, 8, 1.0, 0.1)])
    journal.record([StepRow(1, 1, 0, 0, 8, 1.0, 0.1)], needed=True)
    # A coordinator that was killed has closed nothing; the next one finds all of it.
    again = Journal(small_disk)
    assert again.remembered() == {"plan": b"1999"}
    again.commit({"plan": b"2000"})
    filler.unlink()
    again.record([StepRow(2, 1, 0, 8, 8, 1.0, 0.1)])
    again.close()
    journal.close()
    with RunReader(small_disk) as reader:
        assert [step.operation for step in reader.steps()] == [1, 2]


def test_a_commit_waits_for_room(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    journal = Journal(small_disk)
    journal.commit({"plan": b"1"})
    filler = fill(small_disk / "filler")

    def make_room() -> None:
        try:
            eventually(lambda: "nothing is decided until there is room" in caplog.text, "the journal waits for room")
        finally:
            filler.unlink()

    helper = threading.Thread(target=make_room)
    helper.start()
    journal.commit({"key": b"x" * 100_000})
    helper.join()
    assert journal.remembered()["key"] == b"x" * 100_000
    assert "can be written again" in caplog.text
    journal.close()


def test_a_full_disk_is_an_error_and_damages_nothing(small_disk: Path) -> None:
    journal = Journal(small_disk)
    journal.stop_waiting()
    journal.commit({"plan": b"1"})
    (small_disk / "filler").write_bytes(b"\0" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    with pytest.raises(JournalError, match="disk full"):
        journal.commit({"key": b"x" * 1_000_000})
    (small_disk / "filler").unlink()
    assert journal.remembered()["plan"] == b"1"
    journal.commit({"plan": b"2"})
    journal.close()
    again = Journal(small_disk)
    assert again.remembered()["plan"] == b"2"
    again.close()


def test_leases_that_a_founding_began_with_stand_and_others_are_done_again(tmp_path: Path) -> None:
    def lease(number: int, generation: int) -> StepRow:
        return StepRow(number + 1, generation, 0, number * 8, 8, 1.0, 0.1)

    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.commit({}, plans=[plan(1, PlanStart.FOUND)])
        journal.record([lease(number, 1) for number in range(5)])
        journal.commit({}, plans=[plan(2, PlanStart.FOUND, 1)])
        begun = LeaseSet(0, 1, {3, 5})
        journal.adopt(rows_of_begun(LeaseReport("m", 0, 6, batch=8, length=48, begun=begun), 2))
        journal.record([lease(number, 2) for number in (1, 2)])
        with RunReader(tmp_path) as reader:
            assert [row.operation for row in standing_steps(reader.steps(), reader.plans())] == [1, 2, 3, 4, 6]
        journal.record([lease(4, 2)])
        with RunReader(tmp_path) as reader:
            assert [(row.operation, row.times_done) for row in reader.steps()] == [
                (1, 1),
                (2, 2),
                (3, 2),
                (4, 1),
                (5, 2),
                (6, 1),
            ]
            found = audit(reader.steps(), 48, 8)
    assert found.is_exact
    assert found.num_repeated_steps == 3


def test_rows_of_a_checkpoint_count_in_the_run_that_made_them(tmp_path: Path) -> None:
    """Another run, which began with that checkpoint, did nothing before it."""
    restored = [step(3, 1), step(4, 2)]
    with contextlib.closing(Journal(tmp_path)) as journal:
        journal.commit({}, plans=[plan(1, PlanStart.FOUND), plan(3, PlanStart.FOUND, 4)])
        assert journal.own([*restored, step(5, 3)]) == [*restored, step(5, 3)]
    other = tmp_path / "other"
    other.mkdir()
    with contextlib.closing(Journal(other)) as journal:
        journal.commit({}, plans=[plan(1, PlanStart.FOUND, 4)])
        assert journal.own([*restored, step(5, 1)]) == [step(5, 1)]
