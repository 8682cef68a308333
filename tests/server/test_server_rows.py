"""A sparse table: rows appear, are updated, remembered, evicted and moved."""

from __future__ import annotations

import hashlib
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server import initial, memory
from paceline.server.ages import Clocks
from paceline.server.initial import InitialRows
from paceline.server.parcels import Partitions
from paceline.server.row_optimizers import Hyper
from paceline.server.rows import RowTable
from paceline.server.spec import TableSpec
from paceline.testing import faults

LR = Hyper(lr=0.5)


def table_of(**fields: Any) -> RowTable:
    return RowTable(TableSpec(**{"name": "users", "dim": 4, "seed": 7, **fields}))


def ids_of(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def exported(table: RowTable, chunk_rows: int = 1000) -> dict[int, tuple[list[float], dict[str, list[float]]]]:
    """Everything a table holds, by id."""
    found = {}
    for chunk in table.export(chunk_rows):
        for at, id in enumerate(chunk.ids.tolist()):
            state = {name: value[at].tolist() for name, value in chunk.state.items()}
            found[id] = (chunk.rows[at].tolist(), state)
    return found


# The values that rows begin with.


def mixed(value: int) -> int:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        value = (value ^ value >> shift) * factor % 2**64
    return value


def by_hand(spec: TableSpec, id: int) -> list[float]:
    """One row by plain integers."""
    num_words = (spec.dim + 1) // 2
    digest = hashlib.shake_256(f"paceline row {spec.seed} {spec.name}".encode()).digest(8 * num_words + 8)
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8)]
    of_id = mixed((id * 0x9E3779B97F4A7C15 + keys[0]) % 2**64)
    words = [mixed((of_id + key) % 2**64) for key in keys[1:]]
    bits = [half for word in words for half in (word % 2**32, word >> 32)][: spec.dim]
    if spec.init == "uniform":
        return [((part >> 8) - 2**23) / 2**23 * spec.scale for part in bits]
    normal, values = statistics.NormalDist(), []
    edges = [round(normal.inv_cdf(0.5 + at / 4096) * 2**16) for at in range(2048)] + [4 * 2**16]
    for part in bits:
        at, fraction = part >> 21, (part >> 9) % 4096
        steps = edges[at] * 4096 + (edges[at + 1] - edges[at]) * fraction
        values.append((-steps if part % 2 else steps) / 2**28 * spec.scale)
    return values


@pytest.mark.parametrize("init", ["normal", "uniform"])
@pytest.mark.parametrize("dim", [1, 4, 7])
def test_initial_values_are_those_of_the_formula(init: Any, dim: int) -> None:
    # A power of two, so that no product is rounded before it is compared.
    spec = TableSpec(name="users", dim=dim, seed=7, init=init, scale=0.25)
    ids = [0, 1, -1, 12345, -(2**63), 2**63 - 1]
    expected = torch.tensor([by_hand(spec, id) for id in ids])
    assert torch.equal(InitialRows(spec).of(ids_of(*ids)), expected)


@pytest.mark.parametrize(("init", "digest"), [("normal", "f1a9464ffbec23a1"), ("uniform", "b505567a8cb254d7")])
def test_initial_values_stay_what_they_are(init: Any, digest: str) -> None:
    """A table that is saved has only the rows that were made; the others must come out the same after an upgrade."""
    rows = InitialRows(TableSpec(name="users", dim=5, init=init, scale=0.3)).of(torch.arange(-500, 500) * 2**50)
    assert hashlib.sha256(rows.numpy().astype("<f4").tobytes()).hexdigest()[:16] == digest


def test_no_quantile_depends_on_the_last_bits_of_libm() -> None:
    normal = statistics.NormalDist()
    for at in range(initial._NUM_QUANTILES):
        exact = normal.inv_cdf(0.5 + at / (2 * initial._NUM_QUANTILES)) * initial._QUANTILE_UNIT
        assert abs(exact % 1 - 0.5) > 1e-6


def test_initial_values_do_not_depend_on_the_batch() -> None:
    made = InitialRows(TableSpec(name="users", dim=7))
    ids = torch.arange(10_000)
    rows = made.of(ids)
    assert torch.equal(made.of(ids[8180:8200]), rows[8180:8200])
    assert torch.equal(made.of(ids.flip(0)), rows.flip(0))


def test_normal_values_look_normal() -> None:
    values = InitialRows(TableSpec(name="users", dim=16, scale=2.0)).of(torch.arange(20_000)).double().view(-1) / 2
    assert abs(float(values.mean())) < 0.01
    assert abs(float(values.std()) - 1) < 0.01
    assert abs(float((values**4).mean()) - 3) < 0.05
    for bound in (0.5, 1.0, 2.0, 3.0):
        expected = 2 * (1 - statistics.NormalDist().cdf(bound))
        assert abs(float((values.abs() > bound).double().mean()) - expected) < 0.005


def test_uniform_values_look_uniform() -> None:
    values = InitialRows(TableSpec(name="users", dim=16, init="uniform", scale=0.5)).of(torch.arange(20_000)).view(-1)
    assert float(values.min()) >= -0.5
    assert float(values.max()) < 0.5
    counts = torch.histc(values, bins=20, min=-0.5, max=0.5)
    assert float((counts / len(values) - 0.05).abs().max()) < 0.003


def test_neighbours_elements_seeds_and_names_are_unlike() -> None:
    one = InitialRows(TableSpec(name="users", dim=16)).of(torch.arange(4000))
    for other in (
        one.roll(1, dims=0),
        one.roll(1, dims=1),
        InitialRows(TableSpec(name="users", dim=16, seed=1)).of(torch.arange(4000)),
        InitialRows(TableSpec(name="items", dim=16)).of(torch.arange(4000)),
    ):
        assert abs(float(torch.corrcoef(torch.stack([one.view(-1), other.reshape(-1)]))[0, 1])) < 0.02


# Pulling and pushing.


def test_a_row_is_made_when_it_is_first_seen() -> None:
    table = table_of()
    ids = ids_of(3, -9, 2**62)
    unmade = table.pull(ids, make=False)
    assert len(table) == 0
    made = table.pull(ids)
    assert len(table) == 3
    assert torch.equal(made, unmade)
    assert torch.equal(made, InitialRows(table.spec).of(ids))


def test_a_pull_into_given_memory() -> None:
    table = table_of()
    out = torch.empty(2, 4)
    assert table.pull(ids_of(1, 2), out=out) is out
    assert torch.equal(out, table.pull(ids_of(1, 2)))
    with pytest.raises(ValueError, match=r"out is torch\.float32 of shape \(2, 4\).*for 3 ids"):
        table.pull(ids_of(1, 2, 3), out=out)


def test_a_pull_of_known_and_unknown_rows_without_making() -> None:
    table = table_of(init="zeros", optimizer="sgd")
    table.push(ids_of(5), torch.ones(1, 4), LR, 1)
    assert table.pull(ids_of(4, 5, 6), make=False)[:, 0].tolist() == [0.0, -0.5, 0.0]
    assert len(table) == 1


def test_a_push_makes_and_updates() -> None:
    table = table_of(optimizer="sgd")
    ids = ids_of(10, 20)
    start = table.pull(ids, make=False)
    table.push(ids, torch.ones(2, 4), LR, 1)
    assert torch.equal(table.pull(ids), start - 0.5)
    assert table.version == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": True},
        {"optimizer": "adagrad"},
        {"optimizer": "adagrad", "rowwise": True},
        {"optimizer": "adam", "rowwise": True, "amsgrad": True},
        {"optimizer": "adamw"},
    ],
)
def test_every_kind_of_table_moves_against_the_gradient(dtype: Any, fields: dict[str, Any]) -> None:
    table = table_of(dtype=dtype, dim=6, **fields)
    ids = torch.arange(50)
    start = table.pull(ids)
    assert start.dtype == table.spec.torch_dtype
    hyper = Hyper(lr=0.5, momentum=0.9 if table.spec.momentum else 0.0, amsgrad=table.spec.amsgrad)
    for step in (1, 2):
        table.push(ids, torch.ones(50, 6, dtype=start.dtype), hyper, step)
    assert (table.pull(ids) < start - 0.2).all()
    copy = RowTable(table.spec)
    for chunk in table.export(7):
        copy.load(chunk)
    assert exported(copy) == exported(table)


def test_a_long_push_is_the_same_as_its_pieces() -> None:
    whole, pieces = table_of(optimizer="adam"), table_of(optimizer="adam")
    pieces._update_rows = 3
    ids = torch.arange(100)
    for step in (1, 2, 3):
        grads = torch.randn(100, 4, generator=torch.Generator().manual_seed(step))
        whole.push(ids, grads, LR, step)
        pieces.push(ids, grads, LR, step)
    torch.testing.assert_close(pieces.pull(ids), whole.pull(ids), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    table = table_of(admit_after=1)
    table.load(next(table_with(ids_of(1)).export()))
    before, version = exported(table), table.version
    grads = torch.zeros(3, 4)
    grads[1, 2] = bad
    with pytest.raises(ValueError, match=r"'users'.*id 22 is not finite"):
        table.push(ids_of(1, 22, 3), grads, LR, 1)
    assert exported(table) == before
    assert table.version == version
    table.pull(ids_of(22))
    assert len(table) == 1


def table_with(ids: torch.Tensor) -> RowTable:
    table = table_of()
    table.pull(ids)
    return table


def test_large_gradients_whose_sum_overflows_are_finite() -> None:
    table = table_of(optimizer="sgd")
    table.push(ids_of(1, 2), torch.full((2, 4), 3e38), Hyper(lr=1e-38), 1)
    assert torch.isfinite(table.pull(ids_of(1, 2))).all()


@pytest.mark.parametrize(
    "grads", [torch.zeros(2, 5), torch.zeros(3, 4), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(4, 2).t()]
)
def test_gradients_that_do_not_fit_are_refused(grads: torch.Tensor) -> None:
    table = table_of()
    with pytest.raises(ValueError, match=r"'users': grads is .*\(2, 4\)"):
        table.push(ids_of(1, 2), grads, LR, 1)
    assert len(table) == 0


def test_an_empty_push_and_pull() -> None:
    table = table_of()
    assert table.pull(ids_of()).shape == (0, 4)
    table.push(ids_of(), torch.empty(0, 4), LR, 1)
    assert table.version == 1
    assert list(table.export(10)) == []


# Admission.


def test_a_row_is_made_by_the_push_after_the_last_it_waits_for() -> None:
    table = table_of(optimizer="sgd", admit_after=2)
    start = table.pull(ids_of(1, 2), make=False)
    for step in range(1, 3):
        table.push(ids_of(1), torch.ones(1, 4), LR, step)
        assert torch.equal(table.pull(ids_of(1, 2)), start)
    assert len(table) == 0
    table.push(ids_of(1, 2), torch.ones(2, 4), LR, 3)
    assert len(table) == 1
    assert torch.equal(table.pull(ids_of(1, 2), make=False), torch.stack([start[0] - 0.5, start[1]]))
    assert table.version == 3


def test_pulls_are_no_sightings_because_replicas_do_not_see_them() -> None:
    table = table_of(admit_after=1)
    for _ in range(3):
        table.pull(ids_of(1))
    table.push(ids_of(1), torch.ones(1, 4), LR, 1)
    assert len(table) == 0


def test_ids_that_wait_travel_with_the_rows() -> None:
    source, target = (table_of(optimizer="sgd", admit_after=2) for _ in range(2))
    for step, ids in enumerate([ids_of(1, 2), ids_of(2), ids_of(2, 3)], 1):
        source.push(ids, torch.ones(len(ids), 4), LR, step)
    waiting = source.waiting()
    assert waiting is not None
    assert sorted(zip(waiting.ids.tolist(), waiting.counts.tolist(), strict=True)) == [
        (1, 1),
        (3, 1),
    ]
    for chunk in source.export():
        target.load(chunk)
    target.load_waiting(waiting.select(waiting.ids == 1))
    for table in (source, target):
        for step in (4, 5):
            table.push(ids_of(1, 3), torch.ones(2, 4), LR, step)
    assert set(exported(source)) == {1, 2, 3}
    assert set(exported(target)) == {1, 2}, "of 3 it did not know"


# Ages. A test moves the clock as whoever applies updates does.


class Aging:
    """A table with one clock for all its rows."""

    def __init__(self, evict_after: int, **fields: Any) -> None:
        self.clocks = Clocks()
        self.table = RowTable(
            TableSpec(name="users", dim=4, seed=7, evict_after=evict_after, **{"optimizer": "sgd", **fields}),
            self.clocks,
        )

    def push(self, step: int, *ids: int, sweeps: bool = True) -> None:
        self.table.push(ids_of(*ids), torch.ones(len(ids), 4), LR, step)
        self.clocks.move_on((), step)
        if sweeps:
            self.table.sweep()

    def is_new(self, id: int) -> bool:
        return torch.equal(self.table.pull(ids_of(id), make=False), InitialRows(self.table.spec).of(ids_of(id)))


@pytest.mark.parametrize("sweeps", [True, False])
def test_a_row_is_gone_after_so_many_updates_without_it_whether_it_was_cleared_away_or_not(sweeps: bool) -> None:
    aging = Aging(3)
    aging.push(1, 1, 2, sweeps=sweeps)
    for step in (2, 3):
        aging.push(step, 2, sweeps=sweeps)
    assert not aging.is_new(1), "two updates without it"
    aging.push(4, 2, sweeps=sweeps)
    assert aging.is_new(1)
    assert not aging.is_new(2)
    assert set(exported(aging.table)) == {2}
    aging.push(5, 1, sweeps=sweeps)
    assert torch.equal(aging.table.pull(ids_of(1), make=False), InitialRows(aging.table.spec).of(ids_of(1)) - 0.5), (
        "one update of a new row"
    )


def test_a_pull_makes_no_row_younger() -> None:
    aging = Aging(2)
    aging.push(1, 1)
    for step in (2, 3):
        aging.table.pull(ids_of(1))
        aging.push(step, 9)
    assert aging.is_new(1)


def test_the_state_of_an_old_row_is_gone_too() -> None:
    aging = Aging(2, optimizer="adam")
    aging.push(1, 1)
    aging.push(2, 9, sweeps=False)
    aging.push(3, 9, sweeps=False)
    aging.table.pull(ids_of(1))
    assert all(value == [0.0] * 4 for value in exported(aging.table)[1][1].values())


def test_a_lease_that_comes_late_is_an_update_of_the_present() -> None:
    aging = Aging(3)
    aging.push(100, 1)
    aging.push(5, 2)
    aging.push(102, 9)
    assert not aging.is_new(2), "it was touched when the clock showed 100"
    aging.push(103, 9)
    assert aging.is_new(2)
    assert aging.is_new(1)


def test_rows_stay_as_long_idle_wherever_they_are_loaded() -> None:
    source, target = Aging(3), Aging(3)
    source.push(1, 1)
    source.push(2, 2)
    source.push(3, 9)
    target.clocks.start((), 70)
    for chunk in source.table.export():
        target.table.load(chunk)
    target.push(71, 9)
    assert target.is_new(1)
    assert not target.is_new(2)
    target.push(72, 9)
    assert target.is_new(2)


def test_what_was_saved_without_ages_is_young_and_ages_are_left_out_where_nobody_counts() -> None:
    plain, aging = table_of(optimizer="sgd"), Aging(2)
    plain.push(ids_of(1), torch.ones(1, 4), LR, 1)
    aging.clocks.start((), 50)
    aging.table.load(next(plain.export()))
    assert not aging.is_new(1)
    plain.load(next(aging.table.export()))
    assert next(plain.export()).idle is None


def test_ranges_age_by_their_own_clocks() -> None:
    partitions = Partitions(10, 4)
    clocks = Clocks(partitions)
    table = RowTable(TableSpec(name="t", dim=4, optimizer="sgd", evict_after=2), clocks)
    ids = torch.arange(200)
    homes = partitions.of(ids)
    table.push(ids, torch.ones(200, 4), LR, 1)
    clocks.move_on(range(10, 14), 1)
    clocks.move_on([11], 3)
    assert table.sweep() == int((homes == 11).sum())
    assert set(exported(table)) == set(ids[homes != 11].tolist())


def test_old_rows_are_cleared_away_a_part_at_a_time_and_make_room() -> None:
    aging = Aging(8)
    aging.push(1, *range(20_000))
    num_bytes = aging.table.num_bytes
    for step in range(2, 40):
        aging.push(step, 5)
    assert len(aging.table) == 1
    aging.push(40, *range(100_000, 119_000))
    assert aging.table.num_bytes < num_bytes + 5 * 20_000, "but for the list of what is free"


def test_ids_that_wait_begin_anew_when_they_were_not_seen_for_long() -> None:
    aging = Aging(3, admit_after=1)
    aging.push(1, 1, 2)
    aging.push(2, 2)
    for step in (3, 4):
        aging.push(step, 9)
    aging.push(5, 1)
    assert aging.is_new(1), "it counts from one again"
    aging.push(6, 1)
    assert not aging.is_new(1)


# Versions and eviction.


def test_rows_remember_their_last_change() -> None:
    table = table_of()
    table.push(ids_of(1, 2), torch.ones(2, 4), LR, 1)
    table.push(ids_of(2, 3), torch.ones(2, 4), LR, 2)
    table.pull(ids_of(4))
    asked = ids_of(1, 2, 3, 4, 5)
    assert table.changed_since(asked, 0).tolist() == [True, True, True, True, False]
    assert table.changed_since(asked, 1).tolist() == [False, True, True, True, False]
    assert table.changed_since(asked, 2).tolist() == [False] * 5


def test_an_evicted_row_has_changed_and_so_has_a_loaded_one() -> None:
    aging = Aging(2)
    for step in (1, 2, 3):
        aging.push(step, min(step, 2), sweeps=False)
    seen = aging.table.version - 1
    assert aging.table.changed_since(ids_of(1, 2), seen).tolist() == [True, True]
    seen = aging.table.version
    assert aging.table.changed_since(ids_of(1, 2), seen).tolist() == [False, False]
    aging.table.load(next(aging.table.export()))
    assert aging.table.changed_since(ids_of(1, 2), seen).tolist() == [False, True]


def test_freed_slots_are_reused_and_begin_anew() -> None:
    table = table_of(optimizer="adam")
    old = torch.arange(1000)
    table.push(old, torch.ones(1000, 4), LR, 1)
    table.push(old[:10], torch.ones(10, 4), LR, 2)
    table.drop(old[10:])
    assert len(table) == 10
    num_bytes = table.num_bytes
    new = torch.arange(5000, 5990)
    fresh = table.pull(new)
    assert table.num_bytes == num_bytes
    assert torch.equal(fresh, InitialRows(table.spec).of(new))
    held = exported(table)
    assert set(held) == {*range(10), *range(5000, 5990)}
    assert all(value == [0.0] * 4 for id in range(5000, 5990) for value in held[id][1].values())
    assert torch.equal(table.pull(old[20:30], make=False), InitialRows(table.spec).of(old[20:30]))


# Moving rows.


def test_rows_split_by_key_and_joined_again_are_the_same() -> None:
    table = table_of(optimizer="adam", rowwise=True)
    for step in range(1, 6):
        ids = torch.randperm(500, generator=torch.Generator().manual_seed(step))[:200]
        table.push(ids, torch.randn(200, 4), LR, step)
    table.drop(torch.arange(40))
    parts = [RowTable(table.spec) for _ in range(3)]
    for chunk in table.export(64):
        for at, part in enumerate(parts):
            part.load(chunk.select(chunk.ids % 3 == at))
    assert sum(len(part) for part in parts) == len(table)
    joined = RowTable(table.spec)
    for part in parts:
        for chunk in part.export(50):
            joined.load(chunk)
    assert exported(joined) == exported(table)


def test_a_loaded_row_replaces_the_one_that_is_there() -> None:
    source, target = table_of(optimizer="sgd"), table_of(optimizer="sgd")
    source.push(ids_of(1), torch.ones(1, 4), LR, 1)
    target.push(ids_of(1, 2), torch.ones(2, 4) * 7, LR, 1)
    other = exported(target)[2]
    target.load(next(source.export()))
    assert exported(target) == {1: exported(source)[1], 2: other}


def test_chunks_are_copies_in_a_stable_order() -> None:
    table = table_of(optimizer="sgd")
    table.pull(ids_of(30, 10, 20))
    first = list(table.export(2))
    assert [chunk.ids.tolist() for chunk in first] == [[30, 10], [20]]
    before = first[0].rows.clone()
    table.push(ids_of(30), torch.ones(1, 4), LR, 1)
    assert torch.equal(first[0].rows, before)
    assert [chunk.ids.tolist() for chunk in table.export(2)] == [[30, 10], [20]]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"dim": 5}, r"rows torch\.float32 \(1, 4\).*rows torch\.float32 \(1, 5\)"),
        ({"dtype": "float64"}, r"rows torch\.float32.*rows torch\.float64"),
        ({"optimizer": "adam"}, r"sum.*exp_avg"),
        ({"rowwise": True}, r"sum torch\.float32 \(1, 4\).*sum torch\.float32 \(1, 1\)"),
    ],
)
def test_a_chunk_of_another_kind_of_table_is_refused(fields: dict[str, Any], said: str) -> None:
    other = table_of(**fields)
    other.pull(ids_of(1))
    table = table_of()
    with pytest.raises(ValueError, match=said):
        table.load(next(other.export()))
    assert len(table) == 0


def test_chunks_without_rows() -> None:
    table = table_of()
    table.pull(ids_of(1))
    chunk = next(table.export())
    table.load(chunk.select(torch.zeros(1, dtype=torch.bool)))
    assert len(table) == 1
    with pytest.raises(ValueError, match="chunk_rows=0"):
        next(table.export(0))


# Memory.


def test_bytes_of_a_large_table() -> None:
    table = RowTable(TableSpec(name="t", dim=16, optimizer="adagrad", rowwise=True, init="zeros"))
    for start in range(0, 1_150_000, 50_000):
        table.pull(torch.arange(start, start + 50_000))
        if len(table) >= 1_000_000:
            assert table.row_bytes == 68 * len(table)
            assert table.num_bytes <= 1.6 * table.row_bytes


def test_a_lack_of_memory_is_an_error_and_changes_nothing() -> None:
    table = table_of()
    table.pull(torch.arange(100))
    before = exported(table)
    with faults.little_memory(memory.SPARE_BYTES + 1000):
        for _ in range(2):
            with pytest.raises(MemoryError, match=r"MiB more for the rows of table 'users'.*add servers"):
                table.pull(torch.arange(5000))
        assert exported(table) == before
    assert torch.equal(table.pull(torch.arange(5000)), InitialRows(table.spec).of(torch.arange(5000)))


def test_rows_can_be_dropped_when_memory_is_short() -> None:
    table = table_of()
    table.pull(torch.arange(5000))
    with faults.little_memory(memory.SPARE_BYTES):
        table.drop(torch.arange(5000))
    assert torch.equal(table.pull(torch.arange(5000)), InitialRows(table.spec).of(torch.arange(5000)))


def test_addresses_that_the_system_refuses_are_an_error() -> None:
    with pytest.raises(MemoryError, match="refuses to reserve it"):
        memory.reserve(2**60, "a test")


def test_a_column_grows_in_place_and_begins_with_zeros() -> None:
    column = memory.Column(width=3, dtype=torch.float32, max_slots=200_000, what="a test")
    column.grow(10)
    address = column.tensor.data_ptr()
    column.tensor[9] = 5.0
    column.grow(150_000)
    assert column.tensor.data_ptr() == address
    assert column.gather(ids_of(9, 149_999).numpy()).tolist() == [[5.0] * 3, [0.0] * 3]
    assert 150_000 <= column.num_slots <= 150_000 + memory.SLAB
    assert column.num_bytes == 12 * column.num_slots
    with pytest.raises(MemoryError, match="a test: it is full"):
        column.grow(200_001)


# Against a model.


class Model:
    """A table of plain dicts, with SGD, in which a row is dropped after three updates without it."""

    def __init__(self, spec: TableSpec) -> None:
        self.initial = InitialRows(spec)
        self.rows: dict[int, torch.Tensor] = {}
        self.touched: dict[int, int] = {}

    def pull(self, ids: list[int]) -> torch.Tensor:
        return torch.stack([self.rows[id] if id in self.rows else self.initial.of(ids_of(id))[0] for id in ids])

    def push(self, ids: list[int], grad: float, step: int) -> None:
        for id, row in zip(ids, self.pull(ids), strict=True):
            self.rows[id] = row - 0.5 * grad
            self.touched[id] = step
        for id in [id for id, at in self.touched.items() if step - at >= 3]:
            del self.rows[id], self.touched[id]


IDS = st.lists(st.integers(-30, 30), min_size=1, max_size=20, unique=True)
CALLS = st.lists(st.tuples(st.sampled_from(["pull", "push", "push", "sweep"]), IDS), max_size=15)


@settings(max_examples=60, deadline=None)
@given(CALLS)
def test_it_does_what_a_table_of_dicts_does(calls: list[tuple[str, list[int]]]) -> None:
    aging = Aging(3)
    table, model, step = aging.table, Model(aging.table.spec), 0
    for name, ids in calls:
        if name == "pull":
            torch.testing.assert_close(table.pull(ids_of(*ids)), model.pull(ids))
        elif name == "push":
            step += 1
            aging.push(step, *ids, sweeps=False)
            model.push(ids, 1.0, step)
        else:
            table.sweep()
    held = exported(table, 5)
    assert held.keys() >= model.rows.keys(), "rows that were pulled only are worth as much as none"
    for id, (row, _) in held.items():
        assert row == pytest.approx(model.pull([id])[0].tolist(), rel=1e-6)


# The spec.


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": ""}, "name=''"),
        ({"dim": 0}, "dim=0"),
        ({"dtype": "int8"}, "dtype='int8'.*bfloat16"),
        ({"init": "ones"}, "init='ones'.*normal"),
        ({"scale": -1.0}, "scale=-1.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"optimizer": "lion"}, "optimizer='lion'.*adagrad"),
        ({"optimizer": "sgd", "rowwise": True}, "rowwise=True"),
        ({"optimizer": "adam", "momentum": True}, "momentum=True"),
        ({"optimizer": "sgd", "amsgrad": True}, "amsgrad=True"),
        ({"admit_after": -1}, "admit_after=-1"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        table_of(**fields)
