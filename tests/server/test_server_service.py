"""What a group of servers promises, with as many servers and replicas as you like."""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from paceline.errors import DeadlineExceeded, PacelineError, RequestRefused, Unserved
from paceline.server import client as clients
from paceline.server import service as services
from paceline.server.client import GroupClient
from paceline.server.errand import Errand
from paceline.server.errors import Superseded
from paceline.server.messages import Fence, Need, StageStep
from paceline.server.parcels import Parcel
from paceline.server.store import TensorStore
from paceline.testing import faults
from paceline.wire.endpoint import Endpoint
from paceline.wire.handshake import Credentials
from tests.server.helpers import IDS, NUM_RANGES, group_of, identity, in_thread

SIZES = [(servers, replicas) for servers in (1, 2, 3) for replicas in range(1, servers + 1)]
sizes = pytest.mark.parametrize(("num_servers", "num_replicas"), SIZES)


@sizes
def test_what_is_staged_is_applied_by_its_commit_once_on_every_replica(num_servers: int, num_replicas: int) -> None:
    with group_of(num_servers, num_replicas) as group:
        assert group.values() == {0.0}
        for rank in (1, 0):
            group.stage(1, rank)
            group.stage(1, rank)  # once more: the answer may have been lost
        assert group.values() == {0.0}
        for _ in range(2):
            group.commit(1, num_ranks=2)
            assert group.values(step=1) == {-2.0}
        group.stage(1)  # late, and of no consequence
        group.commit(1, num_ranks=2)
        group.stage(2, gradient=3.0)
        group.commit(2)
        assert group.values(step=2) == {-5.0}
        assert group.num_loaded == 1
        for service in group.services.values():
            assert not service.store._staged
        num_keys = sum(service.store.num_keys for service in group.services.values())
        assert num_keys == num_replicas * len(IDS)


@sizes
def test_a_later_generation_throws_away_what_an_earlier_one_staged(num_servers: int, num_replicas: int) -> None:
    with group_of(num_servers, num_replicas) as group:
        group.stage(1, rank=0)
        group.client.run(Errand(range(NUM_RANGES), push=Fence(2)), lambda _: Parcel(), "fencing", 20.0)
        with pytest.raises(Superseded, match="pushing step 1: its generation is over"):
            group.stage(1, rank=1)
        for rank in (0, 1, 2):
            group.stage(1, rank, gradient=2.0, generation=2)
        group.commit(1, num_ranks=3, generation=2)
        assert group.values(step=1) == {-6.0}


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("moment", ["idle", "staged", "committed"])
def test_the_death_of_a_server_takes_nothing_back(num_replicas: int, moment: str) -> None:
    with group_of(3, num_replicas) as group:
        group.stage(1)
        if moment == "idle":
            group.commit(1)
        victim = group.placement.ranges[0].primary.server
        if moment == "committed":
            worker = in_thread(lambda: group.commit(1))
            group.close(victim)
        else:
            group.close(victim)
            worker = in_thread(lambda: group.commit(1))
        group.settle()  # while the worker asks: what is being handed over is served by nobody until it is
        worker.join()
        assert group.values(step=1) == {-1.0}
        group.stage(2)
        group.commit(2)
        assert group.values(step=2) == {-2.0}
        assert group.num_loaded == 1


def test_a_server_that_is_lost_without_a_replica_is_loaded_anew() -> None:
    with group_of(2) as group:
        group.stage(1)
        group.commit(1)
        group.close(group.placement.ranges[0].primary.server)
        group.settle()
        assert group.values() == {0.0, -1.0}
        assert group.num_loaded == 2


def test_a_pull_of_what_was_lost_waits_until_that_is_known_to_be_done() -> None:
    """The updates of leases 0 and 1 were on a server that is gone. Whoever made one may still bring it again."""
    with group_of(1) as group:
        group.client.on_empty = functools.partial(group.load, restored=True)
        known = iter([0, 0, 1])
        group.client.settled = lambda: next(known, 2)
        errand = Errand(range(NUM_RANGES), pull=Need(epoch=0, prefix=2), notes=True)
        group.client.run(errand, lambda _: Parcel(), "pulling", 20.0)
        assert next(known, None) is None
        assert {(record.epoch, record.prefix) for record in errand.records.values()} == {(0, 2)}


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_ranges_move_to_a_new_server_and_from_one_that_leaves_while_pushes_go_on(num_replicas: int) -> None:
    with group_of(2, num_replicas) as group:
        group.values()
        first = next(iter(group.services))
        is_over = threading.Event()
        steps = [0]

        def push_on() -> None:
            while not is_over.is_set():
                steps[0] += 1
                group.stage(steps[0])
                group.commit(steps[0])

        worker = in_thread(push_on)
        try:
            newcomer = group.start()
            group.settle()
            assert newcomer in {one.primary.server for one in group.placement.ranges}
            group.settle(first)
            assert first not in group.placement.card_of
        finally:
            is_over.set()
            worker.join()
        assert group.values(step=steps[0]) == {-float(steps[0])}
        assert group.services[first].store.num_keys == 0
        assert group.num_loaded == 1


@pytest.mark.parametrize(
    ("ids", "rows", "table", "message"),
    [
        (IDS, torch.ones(30, 2).index_fill(0, torch.tensor([3]), float("nan")), "t", "finite"),
        (IDS, torch.ones(30, 3), "t", "table 't'"),
        (IDS.int(), torch.ones(30, 2), "t", "int64"),
        (IDS, torch.ones(30, 2), "u", "there is no table 'u' on this server, which has 't'"),
    ],
)
def test_what_cannot_be_applied_is_refused_and_nothing_is_changed(
    ids: torch.Tensor, rows: torch.Tensor, table: str, message: str
) -> None:
    with group_of(2, 2) as group:
        group.values()
        with pytest.raises(RequestRefused, match=rf"pushing step 1: server \w+ refused: ValueError: .*{message}"):
            group.push(StageStep(1, 1, 0), ids, rows, 1.0, table)
        group.stage(1, gradient=2.0)  # whoever took its part of the bad push has it; others take this one
        assert group.values() == {0.0}, "nothing counts before its commit"
        assert {service.store.num_keys for service in group.services.values()} == {0}


def test_strangers_and_noise_at_the_port_harm_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with group_of(1) as group:
        group.values()
        (card,) = group.placement.cards
        for noise in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), b""):
            with socket.create_connection(card.address, timeout=5.0) as stranger:
                stranger.sendall(noise)
        endpoint = Endpoint(Credentials(identity(-2), b"another secret" * 3, "worker"))
        stranger_client = GroupClient(endpoint)
        try:
            stranger_client.adopt(group.placement)
            with pytest.raises(PacelineError, match=r"(?s)reading.*server \w+|ranges 0, 1"):
                stranger_client.run(Errand([0, 1], pull=Need()), lambda _: Parcel(), "reading", 0.5)
        finally:
            stranger_client.close()
            endpoint.close()
        group.stage(1)
        group.commit(1)
        assert group.values(step=1) == {-1.0}


class SlowStore(TensorStore):
    """When it `is_slow`, it gives nothing before the worker has given up, and not at once then."""

    is_slow = False

    def __init__(self) -> None:
        super().__init__()
        self.given_up, self.written = threading.Event(), threading.Event()

    def pull(self, ranges: Sequence[int], parcel: Parcel) -> Parcel | None:
        if self.is_slow:
            assert self.given_up.wait(20)
            time.sleep(0.3)  # enough for somebody who does not wait to be gone
        found = super().pull(ranges, parcel)
        if self.is_slow:
            self.written.set()
        return found


def test_who_gives_up_waits_until_nobody_writes_to_its_memory_any_more() -> None:
    store = SlowStore()

    def give_up() -> None:
        if store.is_slow:
            store.given_up.set()
            raise InterruptedError

    with faults.armed(services.STORE, lambda: store), group_of(1, check=give_up) as group:
        group.values()
        store.is_slow = True
        with pytest.raises(InterruptedError):
            group.values()
        assert store.written.is_set()


def test_waits_that_are_in_vain_end_and_say_what_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(1) as group:
        group.values()
        with pytest.raises(
            (Unserved, DeadlineExceeded), match=r"reading: waited 0.2 s for (ranges 0, 1; .*early|server)"
        ):
            group.client.run(Errand([0, 1], pull=Need(step=7)), lambda _: Parcel(), "reading", 0.2)
        monkeypatch.setattr(clients, "DIAL_S", 0.2)
        group.close(next(iter(group.services)))
        with pytest.raises(PacelineError, match=r"reading: waited 0.2 s for (ranges 0|server \w+)"):
            group.client.run(Errand([0], pull=Need()), lambda _: Parcel(), "reading", 0.2)
