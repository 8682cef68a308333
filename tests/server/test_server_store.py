"""The tensors of a server: staged, committed in the order of ranks, moved, and left alone by what is refused."""

from __future__ import annotations

import msgspec
import pytest
import torch

from paceline.server.dense import OptimizerSettings
from paceline.server.messages import ApplyLease, CommitStep, StageStep
from paceline.server.parcels import (
    Detail,
    Making,
    Packing,
    Parcel,
    Partitions,
    Slice,
    Squares,
    TableRows,
    TableSettings,
    UpdateSettings,
)
from paceline.server.spec import TableSpec
from paceline.server.store import TensorStore

SECTION = OptimizerSettings("SGD", {"lr": 0.1})
SPEC = TableSpec(name="t", dim=2, init="zeros", optimizer="sgd")
PARTITIONS = Partitions(2, 4)
EVERYTHING = range(6)
SETTINGS = UpdateSettings((SECTION,), (TableSettings("t", {"lr": 1.0}),), ())
IDS = torch.arange(40)


def home(number: int) -> torch.Tensor:
    """The ids of a partition."""
    return IDS[PARTITIONS.of(IDS) == number]


def loaded(ranges: range | list[int] = EVERYTHING, spec: TableSpec = SPEC) -> TensorStore:
    store = TensorStore()
    packing = Packing()
    makes = tuple(Making(packing.slice(number, torch.arange(3.0) + number), 0) for number in (0, 1))
    store.load(
        ranges, Parcel(Detail(makes=makes, sections=(SECTION,), tables=(spec,), partitions=PARTITIONS), packing.tensors)
    )
    return store


def push(dense: dict[int, torch.Tensor], ids: torch.Tensor | None = None, rows: torch.Tensor | None = None) -> Parcel:
    packing = Packing()
    slices = tuple(packing.slice(number, gradient) for number, gradient in dense.items())
    found: tuple[TableRows, ...] = ()
    if ids is not None:
        values = torch.ones(len(ids), 2) if rows is None else rows
        found = (TableRows("t", packing.add(ids), packing.add(values)),)
    return Parcel(Detail(dense=slices, rows=found), packing.tensors)


def rows_of(store: TensorStore, ids: torch.Tensor, ranges: range | list[int] = EVERYTHING) -> torch.Tensor:
    out = torch.zeros(len(ids), 2)
    detail = Detail(row_wants=(TableRows("t", 0, 0),), makes_rows=False)
    store.pull(ranges, Parcel(detail, [ids], [out]))
    return out


def values_of(store: TensorStore, number: int) -> list[float]:
    out = torch.zeros(3)
    store.pull([number], Parcel(Detail(wants=(Slice(number, 0, 0, 3),)), [], [out]))
    return out.tolist()


def exported(store: TensorStore, ranges: range | list[int]) -> dict[int, list[float]]:
    """The rows of a checkpoint, by id."""
    found = store.pull(ranges, Parcel(Detail(exports=True)))
    assert found is not None
    rows: dict[int, list[float]] = {}
    for chunk in found.detail.chunks:
        ids, values = found.tensors[chunk.ids].tolist(), found.tensors[chunk.tensors["rows"]].tolist()
        assert not set(ids) & rows.keys(), "each id once"
        rows.update(zip(ids, values, strict=True))
    return rows


def test_a_commit_adds_up_in_the_order_of_ranks_whoever_came_first() -> None:
    gradients = [torch.tensor([1e8, 1.0, 0.1]), torch.tensor([1.0, 1.0, 0.2]), torch.tensor([-1e8, 1.0, 0.3])]
    found = []
    for order in ((0, 1, 2), (2, 0, 1)):
        store = loaded()
        for rank in order:
            store.stage(EVERYTHING, StageStep(1, 1, rank), push({0: gradients[rank]}, IDS[:4]))
        assert values_of(store, 0) == [0.0, 1.0, 2.0], "not before the commit"
        store.commit(EVERYTHING, CommitStep(1, 1, 3, 0.5, SETTINGS))
        found.append(values_of(store, 0))
        assert values_of(store, 1) == [1.0, 2.0, 3.0], "nobody pushed to it"
        assert rows_of(store, IDS[:5]).tolist() == [[-1.5, -1.5]] * 4 + [[0.0, 0.0]]
        assert not store._staged
    assert found[0] == found[1]


def test_what_was_pushed_for_other_ranges_than_are_served_is_left_alone() -> None:
    """A worker that goes by an older placement, or a primary whose other ranges are backed up elsewhere, sends more."""
    store = loaded([2])  # all that this server holds is one partition
    store.stage([2], StageStep(1, 1, 0), push({}, IDS))
    store.commit([2], CommitStep(1, 1, 1, 1.0, SETTINGS))
    assert store.num_keys == len(home(2))
    store.apply([2], ApplyLease(0, 1, 1, 1.0, SETTINGS), push({}, IDS))
    assert exported(store, [2]).keys() == set(home(2).tolist())
    assert rows_of(store, IDS, [2])[PARTITIONS.of(IDS) == 2].tolist() == [[-2.0, -2.0]] * len(home(2))
    out = torch.full((len(IDS), 2), 7.0)
    store.pull([2], Parcel(Detail(row_wants=(TableRows("t", 0, 0),), makes_rows=True), [IDS], [out]))
    assert store.num_keys == len(home(2)), "no rows are made for others"
    assert out[PARTITIONS.of(IDS) != 2].eq(7.0).all(), "nor are they answered for"


def test_a_server_that_has_dense_ranges_only_leaves_rows_alone() -> None:
    """A newcomer that is brought up: its first range is a dense one, and its primary forwards pushes as they came."""
    store = TensorStore()
    store.restore(0, loaded().snapshot(0))
    store.stage([0], StageStep(1, 1, 0), push({0: torch.ones(3)}, IDS))
    store.commit([0], CommitStep(1, 1, 1, 10.0, SETTINGS))
    assert values_of(store, 0) == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)
    store.apply([0], ApplyLease(0, 1, 1, 10.0, SETTINGS), push({0: torch.ones(3)}, IDS))
    assert values_of(store, 0) == pytest.approx([-2.0, -1.0, 0.0], abs=1e-6)
    assert store.num_keys == 0


def test_a_range_moves_with_rows_state_and_what_is_staged() -> None:
    store = loaded()
    store.apply(EVERYTHING, ApplyLease(0, 1, 1, 1.0, SETTINGS), push({0: torch.ones(3), 1: torch.ones(3)}, IDS))
    for rank in (0, 1):
        store.stage(EVERYTHING, StageStep(3, 2, rank), push({0: torch.full((3,), float(rank))}, IDS))
    other = TensorStore()
    for number in (0, 3):
        other.restore(number, store.snapshot(number))
    for one in (store, other):
        one.commit([0, 3], CommitStep(3, 2, 2, 1.0, SETTINGS))
    assert values_of(other, 0) == values_of(store, 0)
    assert torch.equal(rows_of(other, home(3), [3]), rows_of(store, home(3), [3]))
    assert exported(other, [0, 3]) == exported(store, [3])
    store.forget(3)
    store.forget(0)
    assert exported(store, [2, 4, 5]).keys() == set(IDS.tolist()) - set(home(3).tolist())
    assert 0 not in store.blocks


def test_what_is_unstaged_does_not_count_and_leaves_nothing() -> None:
    store = loaded()
    store.stage(EVERYTHING, StageStep(1, 1, 0), push({0: torch.ones(3)}, IDS))
    for number in EVERYTHING:
        store.unstage(number, 1, 1)
    assert not store._staged
    store.commit(EVERYTHING, CommitStep(1, 1, 1, 1.0, SETTINGS))
    assert values_of(store, 0) == [0.0, 1.0, 2.0]
    assert store.num_keys == 0


def test_the_squares_are_those_of_the_sum_of_what_is_staged() -> None:
    store = loaded()
    for rank in (0, 1):
        store.stage(EVERYTHING, StageStep(1, 1, rank), push({0: torch.tensor([1.0, 2.0, 0.0])}, IDS[:3]))
    out = torch.full((6,), -1.0, dtype=torch.float64)
    store.pull(EVERYTHING, Parcel(Detail(squares=Squares(1, 1, 2)), [], [out]))
    assert float(out.sum()) == 4.0 + 16.0 + 3 * 2 * 4.0
    store.pull(EVERYTHING, Parcel(Detail(squares=Squares(1, 2, 2)), [], [out]))
    assert float(out.sum()) == 0.0


@pytest.mark.parametrize(
    ("parcel", "message"),
    [
        (push({}, IDS[:2], torch.tensor([[1.0, float("nan")], [0.0, 0.0]])), "finite"),
        (push({}, IDS[:2], torch.ones(2, 3)), "dim|shape|\\[2, 3\\]|\\(2, 3\\)"),
        (push({}, IDS[:2].int(), torch.ones(2, 2)), "int64"),
        (push({}, IDS[:2], torch.ones(3, 2)), "3"),
        (push({0: torch.ones(4)}), "range 0 has 3 elements"),
        (push({0: torch.ones(3, dtype=torch.float64)}), "float64"),
    ],
)
def test_what_cannot_be_applied_is_refused_before_anything_is_changed(parcel: Parcel, message: str) -> None:
    store = loaded()
    with pytest.raises((ValueError, TypeError), match=message):
        store.check(parcel)
    assert values_of(store, 0) == [0.0, 1.0, 2.0]
    assert store.num_keys == 0


def test_a_table_that_is_another_here_is_refused_and_nothing_is_taken_up() -> None:
    store = loaded([2])
    other = msgspec.structs.replace(SPEC, dim=3)
    with pytest.raises(ValueError, match=r"table 't' is .*dim=2.* but .*dim=3.* is to be loaded"):
        store.load([3], Parcel(Detail(tables=(other,), partitions=PARTITIONS)))
    assert store.tables.held == {2}
    with pytest.raises(ValueError, match="there is no table 'u' on this server, which has 't'"):
        store.check(Parcel(Detail(rows=(TableRows("u", 0, 1),)), [IDS, torch.ones(40, 2)]))


def test_replicas_agree_on_which_rows_are_old_and_which_ids_wait() -> None:
    """Whatever else a replica holds, in whichever slots, and when it was brought up."""
    spec = msgspec.structs.replace(SPEC, evict_after=4, admit_after=1)
    primary, backup = loaded(spec=spec), loaded([3], spec=spec)
    brought_up: TensorStore | None = None
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 40):
        ids = IDS[torch.rand(len(IDS), generator=generator) < 0.3]
        number = step if step % 5 else step + 3  # leases come in another order
        for store, ranges in [(primary, EVERYTHING), (backup, [3]), (brought_up, [3])]:
            if store is not None:
                store.apply(ranges, ApplyLease(0, step, number, settings=SETTINGS), push({}, ids))
        rows_of(primary, home(3))
        primary.pull(EVERYTHING, Parcel(Detail(row_wants=(TableRows("t", 0, 0),)), [IDS], [torch.zeros(len(IDS), 2)]))
        if step % 7 == 0:
            assert exported(primary, [3])
            brought_up = TensorStore()
            brought_up.restore(3, primary.snapshot(3))
        for store in (backup, brought_up):
            if store is not None:
                assert exported(store, [3]) == exported(primary, [3])
                assert torch.equal(rows_of(store, home(3), [3]), rows_of(primary, home(3), [3]))
    assert 0 < len(exported(primary, [3])) < len(home(3)), "some are old"
