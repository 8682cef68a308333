"""The chaos harness: its pure parts, that its checks can fail, and a small selection of real schedules."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from paceline.checkpoint.files import Contents, write
from paceline.control.journal.journal import Happening, Journal
from paceline.control.messages.progress import StepRow
from paceline.server.dense import OptimizerSettings
from paceline.server.parcels import Detail, Making, Packing, Parcel, Partitions, TableChunk
from paceline.server.spec import TableSpec
from paceline.server.store import TensorStore
from paceline.testing import netlab
from paceline.testing.chaos import checks, copies, drawing, expecting, oracle
from paceline.testing.chaos.beats import Beats, WorkerBeats, run_gaps
from paceline.testing.chaos.copies import Copy
from paceline.testing.chaos.expecting import Injury
from paceline.testing.chaos.heads import most_apart
from paceline.testing.chaos.leftovers import grown
from paceline.testing.chaos.schedule import MUTATION, Fault, FaultKind, Mode, Schedule, parse
from paceline.testing.chaos.shrinking import shrink, smaller_ones
from paceline.testing.chaos.stage import Past
from paceline.testing.chaos.summing import ResultsFile, ScheduleResult, table

# -- schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(0, 2000, 7))
def test_a_seed_gives_a_legal_schedule_that_its_text_gives_again(seed: int) -> None:
    schedule = drawing.draw(seed)
    assert schedule == drawing.draw(seed)
    assert parse(str(schedule)) == schedule
    for number, fault in enumerate(schedule.faults):
        assert drawing.is_legal(schedule, list(schedule.faults[:number]), fault.kind)
        assert (fault.length_s > 0) == (fault.kind in drawing.LASTING)


def test_every_kind_of_fault_is_drawn_in_every_mode() -> None:
    drawn = {(fault.kind, one.mode) for one in map(drawing.draw, range(2000)) for fault in one.faults}
    possible = {(kind, mode) for kind in FaultKind for mode in Mode} - {(FaultKind.SERVER, Mode.ALLREDUCE)}
    assert drawn == possible


def test_seeds_in_a_row_show_every_kind_in_every_mode_with_one_replica_and_two() -> None:
    """A run of an hour has some fifty schedules: what chance leaves out would never be tried."""
    first = 500_000
    kinds = {fault.kind for one in map(drawing.draw, range(first, first + len(FaultKind))) for fault in one.faults}
    assert len(kinds) >= len(FaultKind) - 1  # there is no server to kill without one
    possible = {(kind, mode) for kind in FaultKind for mode in Mode} - {(FaultKind.SERVER, Mode.ALLREDUCE)}
    schedules = [drawing.draw(seed) for seed in range(first, first + 2 * len(FaultKind) * len(Mode))]
    shown = {(fault.kind, one.mode, one.replicas) for one in schedules for fault in one.faults}
    for kind, mode in possible:
        for replicas in (1, 2) if mode.has_servers else (1,):
            assert (kind, mode, replicas) in shown
    assert {one.hosts for one in schedules} == {1, 2, 3, 4}


def test_one_host_needs_no_lab_and_without_root_there_is_no_small_disk() -> None:
    for seed in range(200):
        schedule = drawing.draw(seed, most_hosts=1, has_root=False)
        assert not schedule.needs_lab
        assert all(fault.kind is not FaultKind.DISK for fault in schedule.faults)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "allreduce",
        "mad hosts=1:",
        "allreduce hosts=9:",
        "allreduce hosts=x:",
        "async hosts=1:",
        "allreduce: 1 trip",
    ],
)
def test_a_text_that_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


# -- what is expected ------------------------------------------------------------------------------------------------


def test_a_loss_is_legal_only_where_the_last_copy_goes() -> None:
    one = Schedule(Mode.ASYNC, servers=2, faults=(Fault(1, FaultKind.SERVER),))
    assert expecting.may_lose(one)
    two = Schedule(Mode.ASYNC, servers=2, replicas=2, faults=(Fault(1, FaultKind.SERVER),))
    assert not expecting.may_lose(two)
    assert not expecting.may_lose(Schedule(Mode.ASYNC, servers=2, faults=(Fault(1, FaultKind.AGENT, 0),)))
    spread = Schedule(Mode.ASYNC, hosts=2, servers=6, replicas=2, faults=(Fault(1, FaultKind.CUT, 1, 8.0),))
    assert expecting.may_lose(spread)


def test_a_gap_may_be_as_long_as_the_faults_around_it_explain() -> None:
    stop = Injury(Fault(1, FaultKind.STOP, 0, 8.0), began=10.0, ended=18.0)
    assert expecting.allowed_gap_s([], 0.0, 1.0) == expecting.STALL_S
    assert expecting.allowed_gap_s([stop], 9.0, 11.0) > expecting.STALL_S + drawing.SILENCE_S
    assert expecting.allowed_gap_s([stop], 60.0, 61.0) == expecting.STALL_S


def test_a_busy_machine_stretches_bounds() -> None:
    assert expecting.stretch([], 2) == 1.0
    assert expecting.stretch([1, 1], 2) == 1.0
    assert expecting.stretch([8, 8], 2) == 4.0


# -- the oracle ------------------------------------------------------------------------------------------------------


def test_every_sample_weighs_alike_after_whole_epochs() -> None:
    weights = oracle.weights_at(3)
    in_tail = oracle.GLOBAL_BATCH / (oracle.LENGTH % oracle.GLOBAL_BATCH)
    assert set(weights[: 3 * oracle.LENGTH].tolist()) == {1.0, in_tail}
    assert not weights[3 * oracle.LENGTH :].any()
    assert oracle.weights_at(1, 32).sum() == oracle.weights_at(1).sum() + 32


def test_epochs_beyond_the_last_slot_add_up() -> None:
    assert oracle.weights_at(oracle.NUM_SLOTS + 1)[: oracle.LENGTH].min() == 2.0


def test_leases_in_any_order_weigh_what_steps_do() -> None:
    done = {(0, lease) for lease in range(oracle.NUM_LEASES)} | {(1, 0), (1, 1)}
    assert np.array_equal(oracle.weights_with(2, lambda epoch, lease: (epoch, lease) in done), oracle.weights_at(1, 32))


@pytest.mark.parametrize("updates", [0, 1, 2, 7, 30, 1000])
def test_updates_are_counted_by_a_parameter_with_momentum(updates: int) -> None:
    pace = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([pace], lr=oracle.PACE_LR, momentum=oracle.PACE_MOMENTUM)
    for _ in range(updates):
        pace.grad = torch.ones(1)
        optimizer.step()
    assert oracle.num_updates(float(pace.detach())) == pytest.approx(updates, abs=oracle.TOLERANCE)


def test_a_lost_momentum_is_no_whole_number_of_updates() -> None:
    pace = torch.nn.Parameter(torch.zeros(1))
    for number in (100, 50):
        optimizer = torch.optim.SGD([pace], lr=oracle.PACE_LR, momentum=oracle.PACE_MOMENTUM)
        for _ in range(number):
            pace.grad = torch.ones(1)
            optimizer.step()
    assert abs(oracle.num_updates(float(pace.detach())) - 150) > 0.5


# -- checks fail where they must -------------------------------------------------------------------------------------


def final(epochs: int, **changes: float) -> dict[str, object]:
    weights = oracle.weights_at(epochs)
    velocity = reached = 0.0
    for _ in range(oracle.updates_at(epochs)):
        velocity = velocity * oracle.PACE_MOMENTUM + 1.0
        reached += velocity
    found = {"counts": weights.copy(), "table": weights.copy()}
    for name, change in changes.items():
        found[name][17] += change
    return {**found, "pace": np.full(4, -reached * oracle.PACE_LR, np.float32), "epochs": np.int64(epochs)}


def test_exact_models_pass() -> None:
    assert not list(checks.final_models({1: final(5), 2: final(5)}, is_exact=True))


def test_a_missing_or_a_repeated_sample_is_found() -> None:
    (missing,) = checks.final_models({1: final(5, counts=-1.0)}, is_exact=True)
    assert "1 samples missing, 0 too often" in missing
    (extra,) = checks.final_models({1: final(5, table=1.0)}, is_exact=True)
    assert "0 samples missing, 1 too often" in extra


def test_a_stated_loss_is_a_loss_and_no_repetition() -> None:
    assert not list(checks.final_models({1: final(5, counts=-1.0)}, is_exact=False))
    assert list(checks.final_models({1: final(5, counts=1.0)}, is_exact=False))


@pytest.mark.parametrize(("said", "is_fair"), [("no update, but rows", False), ("updates 3: why", True)])
def test_a_run_that_says_less_than_it_lost_is_found(tmp_path: Path, said: str, is_fair: bool) -> None:
    with contextlib.closing(Journal(tmp_path)) as journal:
        facts = {"fact/dataset_length": str(oracle.LENGTH), "fact/global_batch": str(oracle.GLOBAL_BATCH)}
        journal.record(run=facts, happenings=[Happening(0, checks.LOST_UPDATES, "m", said)])
    assert not list(checks.closing_line(tmp_path, {1: final(5)}))
    found = list(checks.closing_line(tmp_path, {1: final(5, table=-1.0)}))
    assert len(found) == (0 if is_fair else 1)


def test_models_that_differ_in_one_bit_are_found() -> None:
    (text,) = checks.final_models({1: final(5), 2: final(5, counts=2.0**-20)}, is_exact=True)
    assert "differ in counts" in text


def test_no_model_at_all_is_found() -> None:
    assert list(checks.final_models({}, is_exact=True)) == ["no worker came to the end of the training"]


def test_a_checkpoint_that_lacks_what_its_cursor_says_is_found(tmp_path: Path) -> None:
    counts = torch.from_numpy(oracle.weights_at(2, 64))
    for operation, change in ((1, 0.0), (2, -1.0)):
        weights = counts.clone()
        weights[oracle.LENGTH] += change
        write(
            tmp_path,
            Contents(
                run="r", step=operation, operation=operation, epoch=2, position=64, model={"counts": weights}, state={}
            ),
        )
    (text,) = checks.checkpoints(tmp_path, Schedule(Mode.ALLREDUCE), is_exact=True)
    assert "step-000000002" in text


def test_a_checkpoint_that_lacks_a_lease_of_its_record_is_found(tmp_path: Path) -> None:
    counts = torch.from_numpy(oracle.weights_at(1, 32))
    for operation, prefix in ((1, 2), (2, 3)):
        state = {"leases": {"0": [1, prefix, []], "1": [1, 4, []]}}
        write(
            tmp_path,
            Contents(
                run="r", step=operation, operation=operation, epoch=1, position=0, model={"counts": counts}, state=state
            ),
        )
    (text,) = checks.checkpoints(tmp_path, Schedule(Mode.ASYNC, servers=1), is_exact=True)
    assert "step-000000002" in text
    assert "16 samples missing" in text


def step_row(operation: int) -> StepRow:
    position = (operation - 1) * oracle.GLOBAL_BATCH
    count = min(oracle.GLOBAL_BATCH, oracle.LENGTH - position)
    return StepRow(operation, 1, 0, position, count, 0.0, 0.1)


def write_history(folder: Path, operations: Iterable[int]) -> None:
    folder.mkdir(exist_ok=True)
    with contextlib.closing(Journal(folder)) as journal:
        journal.record(steps=map(step_row, operations), run={"status": "ended"})


def test_steps_that_the_database_lacks_are_found(tmp_path: Path) -> None:
    whole = range(1, oracle.NUM_LEASES + 1)
    write_history(tmp_path / "whole", whole)
    assert not list(checks.recorded(tmp_path / "whole", {1: final(1)}))
    write_history(tmp_path / "lacking", [one for one in whole if one != 5])
    (text,) = checks.recorded(tmp_path / "lacking", {1: final(1)})
    assert "missing are positions 64 to 79" in text


def test_the_history_of_a_run_that_lost_its_host_is_in_two_databases_and_a_checkpoint(tmp_path: Path) -> None:
    write_history(tmp_path / "lost", range(1, 5))
    write_history(tmp_path / "heir", range(8, oracle.NUM_LEASES + 1))
    paths = []
    for held, operations in ((7, (5, 6, 7)), (6, (6, 7))):
        state = {"unrecorded": msgspec.msgpack.encode([step_row(one) for one in operations])}
        contents = Contents(run="r", step=held, operation=held, epoch=0, position=0, model={}, state=state)
        paths.append(write(tmp_path / "held", contents))
    whole, lacking = (Past(tmp_path / "lost", path) for path in paths)
    assert not list(checks.recorded(tmp_path / "heir", {1: final(1)}, [whole]))
    (text,) = checks.recorded(tmp_path / "heir", {1: final(1)}, [lacking])
    assert "missing are positions 64 to 79" in text


def test_copies_of_a_range_that_differ_in_one_bit_are_found() -> None:
    one = Copy("a", 3, 1, True, (7, 0, 0), "x")
    other = msgspec.structs.replace(one, server="b", is_primary=False)
    assert not list(copies.differing([one, other]))
    assert copies.num_compared([one, other]) == 1
    assert not list(copies.differing([one, msgspec.structs.replace(other, applied=(8, 0, 0), digest="y")]))
    (text,) = copies.differing([one, msgspec.structs.replace(other, digest="y")])
    assert "servers a and b have other bits of range 3" in text


def store_with(order: list[int], *, momentum: float = 0.5, row: float = 3.0) -> TensorStore:
    """Rows 9, 4 and 7 of a table, which came in this order; 4 was looked at, and never changed."""
    ids, rows = torch.tensor([9, 4, 7])[order], torch.tensor([[1.0], [0.0], [row]])[order]
    packing = Packing()
    values = packing.slice(0, torch.tensor([1.0, 2.0]))
    making = Making(values, 0, {"momentum_buffer": packing.slice(0, torch.tensor([momentum, 1.0]))})
    detail = Detail(
        makes=(making,),
        sections=(OptimizerSettings("SGD", {"lr": 1.0, "momentum": 0.5}),),
        tables=(TableSpec(name="counted", dim=1, optimizer="sgd", init="zeros"),),
        partitions=Partitions(1, 1),
        chunks=(TableChunk("counted", packing.add(ids), {"rows": packing.add(rows)}),),
    )
    store = TensorStore()
    store.load([0, 1], Parcel(detail, packing.tensors))
    return store


def test_a_digest_is_of_all_that_a_server_keeps_in_whatever_order_it_came() -> None:
    one = store_with([0, 1, 2])
    for number in (0, 1):
        assert copies._digest(one, number) == copies._digest(store_with([2, 0]), number)
    assert copies._digest(one, 0) != copies._digest(store_with([0, 1, 2], momentum=0.5 + 2.0**-20), 0)
    assert copies._digest(one, 1) != copies._digest(store_with([0, 1, 2], row=3.0 + 2.0**-20), 1)
    assert copies._digest(one, 1) != copies._digest(store_with([0, 1]), 1)


def test_beats_are_read_while_they_are_written(tmp_path: Path) -> None:
    beats, path = Beats(tmp_path), tmp_path / "12"
    path.write_text("start 1.0 0\nstep 2.0 1\nstep 2.")
    assert beats.look()[12].steps == [2.0]
    path.write_text("start 1.0 0\nstep 2.0 1\nstep 2.5 2\nend 3.0 0\n")
    assert beats.look()[12].steps == [2.0, 2.5]
    assert beats.workers[12].end_code == 0


def test_the_run_stands_still_only_where_nobody_steps() -> None:
    workers = [WorkerBeats(1, steps=[1.0, 2.0, 9.0]), WorkerBeats(2, steps=[3.0, 4.0])]
    assert max(run_gaps(workers), key=lambda gap: gap[1] - gap[0]) == (4.0, 9.0)
    kill = Injury(Fault(1, FaultKind.KILL), began=5.0, ended=5.0)
    assert checks.longest_gaps([kill], workers) == {"kill": 5.0}


def test_descriptors_that_grow_are_found() -> None:
    assert grown({1: 20, 2: 20}, {1: 21, 3: 500}) == []
    assert len(grown({1: 20}, {1: 200})) == 1


# -- shrinking and summing -------------------------------------------------------------------------------------------


def test_a_failing_schedule_shrinks_to_what_matters() -> None:
    schedule = parse("async hosts=3 workers=2 servers=3 replicas=2 loaders=1: 1 kill 1; 2 stop 0 2; 3 server; 5 drain")

    def fails(one: Schedule) -> bool:
        return any(fault.kind is FaultKind.SERVER for fault in one.faults) and one.hosts > 1

    assert str(shrink(schedule, fails)) == (
        "async hosts=2 workers=1 servers=2 replicas=2 loaders=0 evaluates=0 seed=0: 3 server"
    )


def test_faults_that_were_not_enough_are_not_tried_again() -> None:
    schedule = parse("allreduce hosts=2 workers=2 loaders=1 evaluates=1: 1 kill 1; 2 stop 0 2; 3 coordinator")
    tried: list[Schedule] = []

    def fails(one: Schedule) -> bool:
        tried.append(one)
        return any(fault.kind is FaultKind.STOP for fault in one.faults)

    assert str(shrink(schedule, fails)) == (
        "allreduce hosts=1 workers=1 servers=0 replicas=1 loaders=0 evaluates=0 seed=0: 2 stop 0 2"
    )
    spared = [one.faults for one in tried if not any(fault.kind is FaultKind.STOP for fault in one.faults)]
    assert len(spared) == len(set(spared))
    assert len(tried) < 12


def test_smaller_schedules_are_legal() -> None:
    for seed in range(100):
        for smaller in smaller_ones(drawing.draw(seed)):
            assert all(fault.target < max(smaller.hosts, 1) for fault in smaller.faults if fault.kind is FaultKind.CUT)


def result(seed: int, *violations: str) -> ScheduleResult:
    schedule = drawing.draw(seed)
    kinds = [fault.kind.value for fault in schedule.faults]
    return ScheduleResult(
        seed, schedule.mode.value, str(schedule), list(violations), kinds, [], dict.fromkeys(kinds, 0.5), 20.0, 100
    )


def test_results_outlive_a_runner_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    results = ResultsFile(tmp_path / "deep" / "results.jsonl")
    assert results.read() == []
    results.add(result(1))
    with results.path.open("ab") as file:
        file.write(b'{"seed": 2, "mo\n')
    results.add(result(3, "a sample was lost"))
    assert [one.seed for one in results.read()] == [1, 3]
    assert str(drawing.draw(3)) in results.done()
    assert str(drawing.draw(2)) not in results.done()


def test_the_table_counts_faults_by_kind_and_mode() -> None:
    results = [result(seed) for seed in range(50)] + [result(50, "wrong")]
    lines = table(results)
    assert lines[-1].endswith("1 schedules with violations")
    (total,) = [line for line in lines if line.startswith("all ") and "s" not in line[4:]]
    assert int(total.split()[-1]) == sum(len(one.acted) for one in results)
    assert not [line for line in table(map(result, range(2000))) if line.startswith("not tried")]
    assert "not tried: server with hybrid, server, bounded, async" in table([])
    (hosts,) = [line for line in lines if line.startswith("schedules by hosts")]
    assert sum(map(int, re.findall(r"(\d+) with", hosts))) == len(results)


# -- real schedules --------------------------------------------------------------------------------------------------

WAIT_S = 280.0  # a quiet machine takes a tenth of it
ALONE = [
    "allreduce hosts=1 workers=2 evaluates=1: 0.5 kill 0; 2 coordinator; 4 stop 1 1.5",
    "async hosts=1 workers=2 servers=2 replicas=2: 0.5 server 0; 2 kill 1",
]


def chaos(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline.testing.chaos", "--folder", str(folder), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def check(processes: list[subprocess.Popen[str]]) -> None:
    """All of them at once: each waits for processes to start most of its time."""
    try:
        outputs = [process.communicate(timeout=WAIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def test_how_far_apart_hosts_may_be_that_lost_the_coordinator() -> None:
    assert {mode.value: most_apart(mode, 3) for mode in Mode} == {
        **dict.fromkeys(("allreduce", "hybrid", "server"), 1),
        **dict.fromkeys(("bounded", "async"), 6),
    }


@pytest.mark.hosts
@pytest.mark.timeout(300)
def test_fixed_schedules_on_one_host(tmp_path: Path) -> None:
    check([chaos(tmp_path / str(number), "--schedule", text) for number, text in enumerate(ALONE)])
    (served,) = ResultsFile(tmp_path / "1" / "results.jsonl").read()
    assert served.num_copies > 0  # of ranges, on two servers each


@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")
@pytest.mark.hosts
@pytest.mark.timeout(300)
def test_a_fixed_schedule_on_two_hosts(tmp_path: Path) -> None:
    check([chaos(tmp_path, "--schedule", "allreduce hosts=2 workers=1: 0.5 kill 1; 2 oneway 1 1.5; 4.5 join 2")])


def test_a_violation_is_an_exit_code_a_command_and_a_folder(tmp_path: Path) -> None:
    """No run starts within 6 ms."""
    process = chaos(tmp_path, "--schedule", "allreduce hosts=1 workers=1:", "--patience", "0.0001")
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1, output
    assert "again: python -m paceline.testing.chaos --schedule 'allreduce hosts=1 workers=1" in output
    (kept,) = (tmp_path / "failed").iterdir()
    assert "not within 60 s" in (kept / "violations.txt").read_text()
    assert list((kept / "output").glob("*-run-host0.txt"))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_wrong_product_is_found_and_shrunk_to_one_command_that_fails_again(tmp_path: Path) -> None:
    """Workers that are started again learn their samples twice."""
    schedule = "allreduce hosts=1 workers=2 loaders=1 evaluates=1: 0.5 coordinator; 1.2 kill 1; 3 stop 0 1"
    wrong = {MUTATION: "newcomer"}
    process = chaos(tmp_path, "--schedule", schedule, "--shrink", environment=wrong)
    output = process.communicate(timeout=1500)[0]
    assert process.returncode == 1, output
    (line,) = [line for line in output.splitlines() if line.startswith("  shrunk: ")]
    assignment, *_, text = shlex.split(line.removeprefix("  shrunk: "))
    assert assignment == f"{MUTATION}=newcomer"
    assert [fault.kind for fault in parse(text).faults] == [FaultKind.KILL]
    again = chaos(tmp_path / "again", "--schedule", text, environment=wrong)
    output = again.communicate(timeout=WAIT_S)[0]
    assert again.returncode == 1, output
    assert "too often" in output
