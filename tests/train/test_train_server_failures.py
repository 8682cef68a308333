"""Servers that cannot do what they must, in real runs: out of memory, or unable to follow."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from paceline.testing.rehearsal import Rehearsal
from tests.train import failing_servers
from tests.train.failing_servers import FAILING
from tests.train.server_runs import check_nothing_left, settings_for, wait_for_steps
from tests.train.table_trainers import STEPS, Case, alone, check_close, train

torch.set_num_threads(1)


@pytest.mark.parametrize("how", ["cannot_follow", "cannot_finish_an_update"])
def test_a_server_that_is_not_what_it_is_taken_for_ends_and_another_takes_its_place(tmp_path: Path, how: str) -> None:
    case = Case("server", "momentum", pause_s=0.01, enough=str(tmp_path / "enough"))
    settings = settings_for(1, 2, replicas=2)
    prepare = functools.partial(getattr(failing_servers, how), tmp_path)
    with Rehearsal(train, case, workers=1, folder=tmp_path, settings=settings, prepare_server=prepare) as run:
        wait_for_steps(run, 2)
        (tmp_path / "fail").touch()
        run.wait_for(lambda: run.servers[FAILING].exit_code is not None)
        assert run.servers[FAILING].exit_code == 1
        run.add_server()
        run.wait_for(lambda: run.is_settled([0, 2]))
        (tmp_path / "enough").touch()
        (result,) = run.finish()
        check_close(result, alone(case._replace(enough="", epochs=result["steps"] // STEPS)))
        assert not run.events("lost ranges")
        (why,) = run.events("failed")
        assert "could not be made here" in why or "could not be finished" in why
        assert "give it more memory, or the run more servers" in why
        check_nothing_left(run)


def test_a_table_for_which_a_server_has_no_memory_is_named_with_what_to_do(tmp_path: Path) -> None:
    """Also with replicas: what is refused on one would be refused on all."""
    (tmp_path / "fail").touch()
    prepare = functools.partial(failing_servers.has_no_room_for_rows, tmp_path)
    settings = settings_for(1, 2, replicas=2)
    with Rehearsal(train, Case(), workers=1, folder=tmp_path, settings=settings, prepare_server=prepare) as run:
        run.exhausted = True
        (result,) = run.finish()
        with run.reader() as reader:
            servers = {row.member for row in reader.members() if row.is_server}
        last = result.error.strip().splitlines()[-1]
        assert "RequestRefused" in last
        assert any(f"server {server} refused: MemoryError: no " in last for server in servers), last
        assert "for the rows of table" in last
        assert "evict rows, add servers, or give this one more memory" in last


def test_a_server_with_a_limit_of_its_own_says_what_it_cannot_reserve(tmp_path: Path) -> None:
    prepare = failing_servers.has_few_addresses
    with Rehearsal(
        train, Case(), workers=1, folder=tmp_path, settings=settings_for(1, 1), prepare_server=prepare
    ) as run:
        run.exhausted = True
        (result,) = run.finish()
        last = result.error.strip().splitlines()[-1]
        assert "refused: MemoryError: no " in last, last
        assert "the system refuses" in last
