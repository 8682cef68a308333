"""Rows that are asked for ahead: what is taken is what would be pulled, or nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from paceline.server.errand import Errand
from paceline.server.messages import CommitStep, Need, ServerRequest
from paceline.server.parcels import Parcel
from paceline.strategy.served_rows import ServedRows
from tests.server.helpers import IDS, NUM_RANGES, PARTITIONS, SETTINGS, SPEC, Group, group_of

HALF = IDS[::2]


@contextlib.contextmanager
def rows_of(group: Group, cache: int = 0) -> Iterator[ServedRows]:
    layout: Any = SimpleNamespace(partitions=PARTITIONS)
    sparse: Any = SimpleNamespace(specs=(SPEC,), modules={"t": SimpleNamespace(cache=cache)})
    rows = ServedRows(layout, sparse, group.client)
    try:
        yield rows
    finally:
        rows.close()


def commit(group: Group, rows: ServedRows, step: int) -> None:
    """As the update of a step does it."""
    errand = Errand(range(NUM_RANGES), commit=CommitStep(1, step, 1, 1.0, SETTINGS), pull=Need(step=step))
    rows.need = Need(step=step)

    def pack(_: ServerRequest) -> Parcel:
        return Parcel()

    group.client.run(errand, rows.with_ahead(pack), f"step {step}", 20.0)
    rows.came_ahead(Need(step=step))


def test_what_an_update_changed_comes_with_its_answer_and_the_rest_came_before() -> None:
    with group_of(2, 2, is_far=True) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.ask_ahead({"t": torch.cat([HALF, HALF, torch.tensor([77])])}, None)
        changed = torch.arange(0, 10)
        group.push_rows(2, changed)
        commit(group, rows, 2)
        found = rows.take_ahead()
        assert found is not None
        ids, values = found["t"]
        assert torch.equal(ids, torch.cat([HALF, torch.tensor([77])]))
        assert torch.equal(values, rows.pull({"t": ids}, make=False)["t"])
        assert rows.num_pulled == len(ids) + 5, "of the ten that changed, five were asked for"
        assert rows.take_ahead() is None, "it is used once"


def test_without_an_update_in_between_it_is_as_it_was_pulled() -> None:
    with group_of(1, is_far=True) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.ask_ahead({"t": HALF}, None)
        found = rows.take_ahead()
        assert found is not None
        assert torch.equal(found["t"][1], torch.full((len(HALF), 2), -1.0))
        rows.ask_ahead({"t": HALF}, None)
        group.stage(2)
        group.commit(2)  # without a refresh, as another generation does it
        rows.need = Need(step=2)
        assert rows.take_ahead() is None
        rows.ask_ahead({"t": HALF}, None)
        group.start()
        group.settle()
        assert rows.take_ahead() is None, "another placement"


def test_what_needs_a_lease_that_is_not_done_is_not_given() -> None:
    with group_of(2, is_far=True) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        rows.ask_ahead({"t": HALF}, Need(epoch=0, prefix=1))
        assert rows.take_ahead() is None, "no server has lease 0"
        rows.ask_ahead({"t": HALF}, Need(epoch=0, prefix=0))
        rows.need = Need(epoch=0, prefix=1)
        assert rows.take_ahead() is None, "it has not seen enough"
        rows.ask_ahead({"t": HALF}, Need(epoch=0, prefix=0))
        rows.need = Need(epoch=1, prefix=0)
        assert rows.take_ahead() is None


def test_a_move_and_a_new_group_take_back_what_was_asked_for() -> None:
    with group_of(2, 2, is_far=True) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.ask_ahead({"t": HALF}, None)
        group.start()
        group.settle()
        group.push_rows(2, IDS)
        commit(group, rows, 2)
        assert rows.take_ahead() is None
        rows.ask_ahead({"t": HALF}, None)
        rows.forget_ahead()
        assert rows.take_ahead() is None
        group.push_rows(3, IDS)
        rows.ask_ahead({"t": HALF}, None)
        commit(group, rows, 3)
        found = rows.take_ahead()
        assert found is not None
        assert torch.equal(found["t"][1], rows.pull({"t": HALF}, make=False)["t"])


def test_a_server_that_dies_meanwhile_costs_no_more_than_asking_again() -> None:
    with group_of(2, 2, is_far=True) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.ask_ahead({"t": HALF}, None)
        group.push_rows(2, IDS)
        group.close(next(iter(group.services)))
        mover = threading.Timer(0.2, group.settle)
        mover.start()
        commit(group, rows, 2)
        mover.join()
        assert rows.take_ahead() is None
        assert torch.equal(rows.pull({"t": IDS}, make=False)["t"], torch.full((len(IDS), 2), -2.0))


def test_cached_rows_are_not_asked_for() -> None:
    with group_of(2, is_far=True) as group, rows_of(group, cache=4) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.pull({"t": HALF}, make=True)
        rows.keep({})
        rows.ask_ahead({"t": IDS}, None)
        found = rows.take_ahead()
        assert found is not None
        assert torch.equal(found["t"][1], torch.full((len(IDS), 2), -1.0))
        assert rows.num_pulled == len(IDS)
        rows.pull({"t": IDS}, make=True)
        assert rows.num_pulled == len(IDS), "now all are cached"


def test_servers_on_this_host_give_all_rows_of_the_next_batch_with_the_update() -> None:
    with group_of(2, 2) as group, rows_of(group, cache=4) as rows:
        group.stage(1)
        group.commit(1)
        rows.need = Need(step=1)
        rows.pull({"t": IDS[:4]}, make=True)
        rows.ask_ahead({"t": HALF}, None)
        assert rows.take_ahead() is None, "no update has brought them"
        rows.ask_ahead({"t": HALF}, None)
        group.push_rows(2, IDS)
        group.close(next(iter(group.services)))
        mover = threading.Timer(0.2, group.settle)
        mover.start()
        commit(group, rows, 2)
        mover.join()
        found = rows.take_ahead()
        assert found is not None
        wanted = torch.full((len(HALF), 2), -2.0)
        wanted[:2] = -1.0
        assert torch.equal(found["t"][1], wanted), "two are cached; a death in between is no matter"
        rows.ask_ahead({"t": HALF}, None)
        rows.forget_ahead()
        group.push_rows(3, IDS)
        commit(group, rows, 3)
        assert rows.take_ahead() is None


def test_leases_that_are_known_to_be_done_say_what_rows_of_the_next_one_have_seen() -> None:
    with group_of(1) as group, rows_of(group) as rows:
        group.stage(1)
        group.commit(1)
        for settled, prefix in [(3, 3), (3, 4)]:
            rows.need = Need(epoch=0, prefix=0, settled=settled)
            rows.ask_ahead({"t": HALF}, Need(epoch=0, prefix=prefix))
            group.client.run(Errand(range(NUM_RANGES), pull=Need()), rows.with_ahead(lambda _: Parcel()), "a push")
            rows.came_ahead()
            rows.need = Need(epoch=0, prefix=prefix, settled=settled)
            assert (rows.take_ahead() is not None) is (prefix <= settled)
