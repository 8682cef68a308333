"""What a run left behind, in words."""

from __future__ import annotations

from pathlib import Path

from paceline.control.journal.journal import Happening, Journal
from paceline.testing.account import account_of


def test_an_account_has_the_events_and_the_ends_of_all_logs(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.commit({}, [Happening(1, "evicted", "m1", "was not heard of for 9.0 s")])
    journal.close()
    (tmp_path / "worker-0.log").write_text("".join(f"line {number}\n" for number in range(100)))
    (tmp_path / "server-0.log").touch()
    account = account_of(tmp_path)
    assert "evicted m1: was not heard of for 9.0 s" in account
    assert "worker-0.log:" in account
    assert "  line 99" in account
    assert "line 59\n" not in account
    assert "server-0.log" not in account


def test_an_account_of_a_run_that_did_not_begin_says_so(tmp_path: Path) -> None:
    assert "run.db" in account_of(tmp_path)
