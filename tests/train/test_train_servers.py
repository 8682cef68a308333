"""Parameters and tables on real servers: a run comes to what one process comes to, whoever dies, leaves or joins."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.checkpoint import find
from paceline.control.machines.coordinator_events import RunSettings
from paceline.control.messages.losses import numbers_in
from paceline.nn import Embedding
from paceline.testing.rehearsal import Rehearsal
from paceline.train.session import Session
from tests.train.server_runs import check_nothing_left, settings_for, wait_for_steps
from tests.train.table_trainers import STEPS, Case, alone, check_alike, check_close, train

torch.set_num_threads(1)


# Rows that come late and go early, and are asked for ahead: the same in one process and in many.
PASSING: dict[str, Any] = {"prefetches": True, "is_far": True, "tables": (("admit_after", 1), ("evict_after", 4))}
CLIPPED = {"clip_norm": 0.5, "micro_batch": 3, "is_weighted": True}
# A step that is skipped, and a layer that is frozen, with clipping: what is staged is of other steps than usual.
UNEVEN = {"optimizer": "adagrad and nadam", "clip_norm": 0.5, "bad_step": 4, "freezes_at": 7}


@pytest.mark.parametrize(
    "case",
    [
        Case("server", "adamw"),
        Case("server", "momentum", **CLIPPED),  # type: ignore[arg-type]
        pytest.param(Case("server", **UNEVEN), marks=pytest.mark.soak),  # type: ignore[arg-type]
        Case("hybrid", "momentum", **CLIPPED),  # type: ignore[arg-type]
        Case("hybrid", **UNEVEN),  # type: ignore[arg-type]
        Case("allreduce", **UNEVEN),  # type: ignore[arg-type]
    ],
    ids=lambda case: f"{case.strategy}-{case.optimizer}",
)
def test_every_strategy_comes_to_what_one_process_comes_to(tmp_path: Path, case: Case) -> None:
    num_servers = 0 if case.strategy == "allreduce" else 2
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, num_servers)) as run:
        results = run.finish()
        check_alike(results)
        check_close(results[0], alone(case))
        check_nothing_left(run)
        assert [server.exit_code for server in run.servers] == [0] * num_servers


def test_batch_statistics_are_the_same_as_with_all_reduce(tmp_path: Path) -> None:
    """They are those of each worker's share, so they are compared at equal shares."""
    found = []
    for name, num_servers in (("server", 1), ("allreduce", 0)):
        (folder := tmp_path / name).mkdir()
        case = Case(name, "momentum", epochs=2, has_statistics=True)
        settings = RunSettings(wanted=2, fewest=2, most=2, servers=num_servers, shares=(1, 1))
        with Rehearsal(train, case, workers=2, folder=folder, settings=settings) as run:
            results = run.finish()
            check_alike(results)
            found.append(results[0])
    check_close(found[0], found[1])
    assert found[0]["parameters"]["statistics.num_batches_tracked"] == 2 * STEPS


@pytest.mark.parametrize(
    "case",
    [
        Case("server", "adamw", clip_norm=1.0, **PASSING),
        pytest.param(Case("hybrid", "momentum", prefetches=True), marks=pytest.mark.soak),
    ],
    ids=lambda c: c[0],
)
def test_with_replicas_nothing_is_lost_by_deaths_leaves_and_joins(tmp_path: Path, case: Case) -> None:
    case = case._replace(epochs=9, pause_s=0.01)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2, replicas=2)) as run:
        wait_for_steps(run, 3)
        run.servers[0].send(signal.SIGKILL)
        run.add_server()
        wait_for_steps(run, 2)
        run.wait_for(lambda: run.is_settled([1, 2]))
        run.kill(0)
        run.add()
        wait_for_steps(run, 3)
        run.servers[1].send(signal.SIGTERM)
        run.wait_for(lambda: run.is_settled([2]))
        run.wait_for(lambda: run.servers[1].exit_code is not None)
        assert run.servers[1].exit_code == 0
        run.add_server()
        run.wait_for(lambda: run.is_settled([2, 3]))
        assert {one.primary.server for one in run.placement().ranges} == run.placement().card_of.keys(), "both serve"
        results = run.finish([1, 2])
        check_alike(results)
        check_close(results[0], alone(case))
        assert not run.events("lost ranges")
        check_nothing_left(run)


def test_a_stopped_server_is_replaced_and_the_coordinator_dies_with_another(tmp_path: Path) -> None:
    case = Case("server", "momentum", epochs=9, pause_s=0.01)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 3, replicas=2)) as run:
        wait_for_steps(run, 2)
        run.servers[1].send(signal.SIGSTOP)
        wait_for_steps(run, 2)
        run.wait_for(lambda: run.is_settled([0, 2]))
        run.wait_for(lambda: run.servers[1].exit_code is not None)
        run.kill_coordinator()
        run.servers[2].send(signal.SIGKILL)
        run.start_coordinator()
        wait_for_steps(run, 2)
        results = run.finish()
        check_alike(results)
        check_close(results[0], alone(case))
        assert not run.events("lost ranges")


@pytest.mark.parametrize("strategy", ["server", "hybrid"])
def test_without_replicas_what_a_server_had_goes_back_to_the_checkpoint_and_the_log_says_so(
    tmp_path: Path, strategy: str
) -> None:
    case = Case(strategy, "adamw", epochs=5, pause_s=0.005, every_steps=2)
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 2)) as run:
        run.wait_for(lambda: find(tmp_path / "checkpoints"))
        wait_for_steps(run, 1)
        first = run.placement().ranges[0].primary.server  # the server of the first range, a dense one if any is
        (pid,) = (row["pid"] for row in run.ask("status")["members"] if row["member"] == first)
        os.kill(pid, signal.SIGKILL)
        run.add_server()
        wait_for_steps(run, 3)
        results = run.finish()
        check_alike(results)
        assert (results[0]["steps"], results[0]["skipped"]) == (5 * STEPS, 0)
        assert all(torch.tensor(results[0]["losses"]).isfinite())
        (lost,) = run.events("lost ranges")
        assert "no server that lives has them" in lost
        told = [text for text in run.events("lost updates") if "a server was lost" in text]
        assert all(numbers_in(text) for text in told), "the steps since the checkpoint"
        assert "parts of the tables' rows" in " ".join(told)
        assert all("go back to the last checkpoint" in text for text in told)
        assert ("what optimizers kept" in " ".join(told)) is (strategy == "server")


def test_a_run_goes_on_with_other_servers_and_another_strategy(tmp_path: Path) -> None:
    wanted = alone(Case(epochs=4, **PASSING))
    for epochs, strategy, num_servers in [(1, "server", 2), (2, "server", 1), (3, "hybrid", 2), (4, "allreduce", 0)]:
        case = Case(strategy, epochs=epochs, **PASSING)
        with Rehearsal(train, case, workers=1, folder=tmp_path, settings=settings_for(1, num_servers)) as run:
            (result,) = run.finish()
            assert isinstance(result, dict), result
            assert len(result["losses"]) == STEPS
            check_nothing_left(run)
            assert not run.events("lost ranges")
    check_close(result, wanted)


def test_a_strategy_that_needs_servers_says_so_where_there_are_none(tmp_path: Path) -> None:
    with Rehearsal(train, Case("server"), workers=1, folder=tmp_path) as run:
        (result,) = run.finish()
        assert "RunFailed" in result.error
        assert "there are none: give --servers 1" in result.error


def refused(what: str) -> dict[str, Any]:
    """What a session on servers says to a script that cannot work."""
    model = nn.Sequential(Embedding(2), nn.Flatten(), nn.Linear(2, 1))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy: Any = "server"
    if what == "unknown":
        strategy = "servers"
    elif what == "no tables":
        strategy, model = "hybrid", nn.Sequential(nn.Linear(1, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    elif what == "LBFGS":
        optimizer = torch.optim.LBFGS(model.parameters())
    elif what == "custom":
        optimizer = type("Mine", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    elif what == "RMSprop":
        optimizer = torch.optim.RMSprop(model.parameters())
    session = Session(model, optimizer, data=[(1, 1.0), (2, 2.0)], global_batch=1, strategy=strategy)
    for epoch in session.epochs(2):
        for batch in epoch:
            session.step(lambda ids, y: model(ids.view(-1, 1)).sum(), batch)
            if what == "added":
                more = nn.Linear(1, 1)
                model.add_module("3", more)
                optimizer.add_param_group({"params": more.parameters()})
    return {}


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unknown", "ValueError: strategy='servers': give one of 'allreduce', 'server', 'hybrid'"),
        ("no tables", "ValueError: strategy='hybrid' keeps tables on servers, and the model has none"),
        ("LBFGS", "ValueError: LBFGS evaluates the loss several times"),
        ("custom", "Mine"),
        ("RMSprop", "ValueError: table '0' is in RMSprop, which has no rule for rows"),
        ("added", "ValueError: 3.weight became trainable after the session was made"),
    ],
)
def test_scripts_that_cannot_work_on_servers_are_told_why(tmp_path: Path, what: str, message: str) -> None:
    with Rehearsal(refused, what, workers=1, folder=tmp_path, settings=settings_for(1, 1)) as run:
        run.exhausted = True
        (result,) = run.finish()
        assert message in result.error


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(int(os.environ.get("PACELINE_SOAK_SEEDS", "6"))))
def test_servers_and_workers_come_and_go_at_random(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    optimizer = ("adamw", "momentum", "adagrad and nadam")[seed % 3]
    case = Case(("server", "hybrid")[seed % 2], optimizer, 12, 0.01, clip_norm=(1.0, None)[seed // 2 % 2])
    case = case._replace(**PASSING) if seed % 4 else case
    with Rehearsal(train, case, workers=2, folder=tmp_path, settings=settings_for(2, 3, replicas=2)) as run:
        workers, servers = [0, 1], [0, 1, 2]
        for _ in range(6):
            wait_for_steps(run, dice.randint(1, 4))
            what = dice.choice(("SIGKILL", "SIGTERM", "SIGSTOP", "worker", "coordinator"))
            if what == "worker":
                run.kill(workers.pop(dice.randrange(2)))
                run.add()
                workers.append(len(run.workers) - 1)
                continue
            if what == "coordinator":
                run.kill_coordinator()
            server = servers.pop(dice.randrange(3))
            run.servers[server].send(signal.SIGKILL if what == "coordinator" else signal.Signals[what])
            if what == "coordinator":
                run.start_coordinator()
            run.add_server()
            servers.append(len(run.servers) - 1)
            run.wait_for(lambda: run.is_settled(servers))
        results = run.finish(workers)
        check_alike(results)
        check_close(results[0], alone(case))
        assert not run.events("lost ranges")
