"""How a world begins, ends, begins again, and what its members are told when something is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend fake
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore
from torch.nn.parallel import DistributedDataParallel

import paceline.c10d
from paceline import errors
from paceline.c10d import process_group
from paceline.c10d.calling import movable
from paceline.c10d.errors import translate
from paceline.c10d.options import listening_address
from paceline.c10d.rendezvous import _Board
from paceline.store import StoreClient, StoreInvitation, StoreServer
from paceline.store.torch_store import TorchStore
from paceline.testing import netlab
from paceline.testing.crew import Crew, say
from paceline.testing.eventually import eventually
from paceline.testing.netlab import Netlab
from paceline.wire.deadline import Deadline
from tests.c10d import worlds
from tests.c10d.worlds import each, free_port, init, total, wait_for_the_end_of_threads

SHORT = timedelta(seconds=2)


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew(3, form=False) as crew:
        yield crew


# -- beginning -------------------------------------------------------------------------------------------------------


def begin_twice(_: None, rank: int, first: str, second: str) -> list[float]:
    found = []
    for where in (first, second):
        init(rank, where)
        part = dist.new_group([0, 2])
        if rank != 1:
            dist.barrier(part)
        found.append(total())
        dist.destroy_process_group()
    wait_for_the_end_of_threads()
    return found


@pytest.mark.parametrize("kind", ["file", "tcp", "env"])
def test_a_world_begins_ends_and_begins_again(crew: Crew, kind: str) -> None:
    if kind == "file":
        places = [f"file://{worlds.new_file()}" for _ in range(2)]
    elif kind == "tcp":
        places = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    else:
        crew.run(set_master, free_port())
        places = ["env://"] * 2
    each(crew, begin_twice, *places)
    assert crew.finish() == [[6.0, 6.0]] * 3


def set_master(_: None, port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def begin_with_store(_: None, rank: int, invitation: StoreInvitation) -> list[float]:
    store, found = TorchStore(invitation), []
    if rank:  # a try that fails does not count
        with pytest.raises(dist.DistStoreError, match=r"ranks \[0.* did not come"):
            dist.init_process_group("paceline", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=0.5))
        say("failed")
    for ranks in ([0, 2], [1, 2]):  # the same store again: the next round, and other groups by the same name
        dist.init_process_group("paceline", store=store, rank=rank, world_size=3, timeout=worlds.TIMEOUT)
        part = dist.new_group(ranks)
        if rank in ranks:
            dist.barrier(part)
        found.append(total())
        dist.destroy_process_group()
    store.close()
    return found


def test_a_given_store_serves_one_world_after_the_other(crew: Crew) -> None:
    with StoreServer() as server:
        for rank in (1, 2):
            crew.start(begin_with_store, rank, server.invitation, ranks=[rank])
        for rank in (1, 2):
            assert crew.hear(rank) == "failed"
        crew.start(begin_with_store, 0, server.invitation, ranks=[0])
        assert crew.finish() == [[6.0, 6.0]] * 3


def begin_beside_others(_: None, rank: int, invitation: StoreInvitation) -> list[float]:
    """The default group is of a backend that leaves nothing in the store, and does not hold anybody up."""
    store, found = TorchStore(invitation), []
    for ranks in ([0, 2], [1, 2], [0, 1, 2], [0, 2], [2, 1]):
        dist.init_process_group("fake", store=store, rank=rank, world_size=3)
        part = dist.new_group(ranks, backend="cpu:paceline", timeout=worlds.TIMEOUT)
        if rank in ranks:
            tensor = torch.full((10,), rank + 1.0)
            dist.all_reduce(tensor, group=part)
            found.append(float(tensor[0]))
        dist.destroy_process_group()
    store.close()
    return found


def test_groups_in_a_world_of_another_backend_know_nothing_of_those_before(crew: Crew) -> None:
    """Torch counts groups from 0 in every world, so on one store other ranks come to a name that was used."""
    with StoreServer() as server:
        each(crew, begin_beside_others, server.invitation)
        assert crew.finish() == [[4.0, 6.0, 4.0], [5.0, 6.0, 5.0], [4.0, 5.0, 6.0, 4.0, 5.0]]


def grow(_: None, rank: int, invitation: StoreInvitation) -> list[float]:
    store, found = TorchStore(invitation), []
    for size in (2, 3, 2):
        if rank < size:
            dist.init_process_group("paceline", store=store, rank=rank, world_size=size, timeout=worlds.TIMEOUT)
            found.append(total())
            if len(found) == 1:
                say("begun")
            dist.destroy_process_group()
    store.close()
    return found


def test_the_next_world_may_have_more_ranks_or_less(crew: Crew) -> None:
    with StoreServer() as server:
        for rank in range(2):
            crew.start(grow, rank, server.invitation, ranks=[rank])
        assert crew.hear(0) == "begun"
        crew.start(grow, 2, server.invitation, ranks=[2])
        assert (crew.hear(1), crew.hear(2)) == ("begun", "begun")
        assert crew.finish() == [[3.0, 6.0, 3.0], [3.0, 6.0, 3.0], [6.0]]
        with contextlib.closing(StoreClient(server.invitation)) as client:
            keys = client.keys()
            left = {key.rpartition("/")[0].rpartition("/")[2] for key in keys if "cpu/" in key}
        assert left <= {"seat", "owner"}


def test_who_comes_again_after_a_try_that_failed_is_let_in() -> None:
    """Rank 0 has seen what the failed try left, and sealed the secret for a key that nobody has any more."""
    store = HashStore()
    failed = _Board(store, 1, 2, Deadline(0.05, "the first try"))
    with pytest.raises(dist.DistStoreError):
        failed.sit_down()
    failed.stand_up()
    first, second = (_Board(store, rank, 2, Deadline(10.0, "the second try")) for rank in (0, 1))
    first.sit_down()
    secret = first.agree_on_secret()
    with ThreadPoolExecutor(1) as pool:
        exchanged = pool.submit(first.exchange, "card", "zero", str)
        second.sit_down()
        assert second.agree_on_secret() == secret
        assert second.exchange("card", "one", str) == ["zero", "one"]
        assert exchanged.result() == ["zero", "one"]


def test_our_store_is_one_of_torchs() -> None:
    with StoreServer() as server:
        store = TorchStore(server.invitation, timedelta(seconds=5))
        torch._C._distributed_c10d._test_python_store(store)
        prefixed = PrefixStore("a", store)
        prefixed.set("key", "value")
        assert (prefixed.get("key"), store.get("a/key")) == (b"value", b"value")
        assert (store.add("count", 2), prefixed.add("count", 3)) == (2, 3)
        assert store.check(["a/key"])
        assert not prefixed.check(["other"])
        for timeout in (timedelta(0), timedelta(days=1000)):
            prefixed.set_timeout(timeout)
            assert prefixed.get("key") == b"value"
        prefixed.set_timeout(timedelta(milliseconds=20))
        with pytest.raises(dist.DistStoreError, match="other"):
            prefixed.get("other")
        assert prefixed.compare_set("key", "value", "new") == b"new"
        assert prefixed.delete_key("key")
        with pytest.raises(dist.DistStoreError, match="never"):
            store.wait(["never"], timedelta(milliseconds=20))
        store.close()
    with pytest.raises(dist.DistStoreError):
        store.get("key")


def test_a_wait_that_was_interrupted_leaves_nothing_for_the_next_call() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    with StoreServer() as server:
        client = StoreClient(server.invitation)
        try:
            client.set("key", b"value")  # by a connection that is there
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                client.wait(["never"], 5.0)
            assert client.add("count", 3) == 3
        finally:
            signal.signal(signal.SIGALRM, before)
            client.close()


class LooksTooEarly(_Board):
    """Finds nobody at first, and looks again when the other has gone on."""

    def __init__(self, store: HashStore, *others: Any) -> None:
        super().__init__(store, *others)
        self.looks: list[str] = []

    def _comes(self, key: str) -> bool:
        self.looks.append(key)
        if len(self.looks) > 1:
            return super()._comes(key)
        eventually(lambda: not self._store.check(["here/1"]), "the other has taken its card away")
        return False


def test_the_first_rank_looks_for_a_newcomer_that_has_just_gone_on() -> None:
    """Between its look for the other's card, in vain, and for a new key, the other left the card and took its key."""
    store = HashStore()
    first, second = LooksTooEarly(store, 0, 2, Deadline(10.0, "test")), _Board(store, 1, 2, Deadline(10.0, "test"))

    def form(board: _Board) -> list[int]:
        board.sit_down()
        board.agree_on_secret()
        return board.exchange("number", board._rank, int)

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(form, [first, second])) == [[0, 1]] * 2
    assert len(first.looks) == 2


def alone(_: None) -> list[float]:
    found = []
    for name in ("paceline", "cpu:paceline", "cpu:paceline,cuda:nccl"):
        dist.init_process_group(name, store=HashStore(), rank=0, world_size=1)
        assert isinstance(dist.new_group([0]), paceline.c10d.ProcessGroup)
        found.append(total())
        with pytest.raises(dist.DistBackendError, match="is on meta; these collectives work in host memory"):
            dist.all_reduce(torch.ones(1, device="meta"))
        dist.destroy_process_group()
    return found


def test_a_world_of_one_by_every_name_of_the_backend(crew: Crew) -> None:
    assert crew.run(alone, ranks=[0]) == [[1.0, 1.0, 1.0]]


@pytest.mark.skipif(netlab.why_unavailable() is not None, reason=netlab.why_unavailable() or "")
def test_hosts_are_mixed_memory_inside_sockets_with_tls_between() -> None:
    with Netlab(2) as lab, Crew(3, hosts="aab", lab=lab.hosts, form=False) as crew:
        each(crew, begin_on_hosts, f"tcp://{lab.hosts[0].address}:23456")
        assert crew.finish() == [(6.0, 2, True)] * 3


def begin_on_hosts(_: None, rank: int, where: str) -> tuple[float, int, bool]:
    init(rank, where)
    world = dist.group.WORLD
    assert isinstance(world, paceline.c10d.ProcessGroup)
    found = total(), len(world.group.hosts), world.group.cards[0].tls
    dist.barrier()
    dist.destroy_process_group()
    return found


# -- ending ----------------------------------------------------------------------------------------------------------


def end_twice(_: None, rank: int, first: str, second: str) -> list[float]:
    init(rank, first)
    found, world = [total()], dist.group.WORLD
    assert world is not None
    child = os.fork()
    if child == 0:  # it leaves nothing in the name of its parent
        try:
            process_group._leave_all()
            dist.destroy_process_group()
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
    found.append(total())
    with contextlib.suppress(dist.DistBackendError):  # of who has aborted already
        dist.barrier()
    world.abort()
    world.shutdown()
    dist.destroy_process_group()
    init(rank, second)
    found.append(total())
    dist.destroy_process_group()
    return found


def test_an_aborted_world_can_be_destroyed_and_begin_again(crew: Crew) -> None:
    each(crew, end_twice, *(f"file://{worlds.new_file()}" for _ in range(2)))
    assert crew.finish() == [[6.0, 6.0, 6.0]] * 3


def part_with_a_timeout(_: None, rank: int, where: str) -> str:
    init(rank, where)
    world = dist.group.WORLD
    assert world is not None
    world.set_timeout(timedelta(days=400))
    with pytest.raises(ValueError):
        world.set_timeout(timedelta(0))
    told = ""
    part = world.split_group([0, 1], timeout=timedelta(seconds=0.3))
    if part is not None and rank == 0:
        with pytest.raises(TimeoutError) as caught:
            part.allreduce(torch.ones(1)).wait()
        told = str(caught.value)
    dist.barrier()
    other = world.split_group([0, 1, 2])
    assert other is not None
    dist.destroy_process_group()
    with pytest.raises(dist.DistBackendError):
        other.barrier()
    return told


def test_a_part_has_its_own_timeout_and_ends_with_the_whole(crew: Crew) -> None:
    each(crew, part_with_a_timeout, f"file://{worlds.new_file()}")
    assert "waited 0.3 s" in crew.finish()[0]


# -- what is wrong ---------------------------------------------------------------------------------------------------


def fail_to_begin(_: None, rank: int, where: str, size: int, timeout: timedelta = SHORT) -> str:
    try:
        init(rank, where, size, timeout)
    except dist.DistError as error:
        assert not dist.is_initialized()
        return f"{type(error).__name__}: {error}"
    dist.destroy_process_group()
    return "began"


def test_ranks_that_do_not_come_are_named(crew: Crew) -> None:
    where = f"file://{worlds.new_file()}"
    each(crew, fail_to_begin, where, 5)
    for told in crew.finish():
        assert "StoreFailed" in told
        assert "ranks [3, 4] did not come" in told


def begin_as(_: None, rank: int, invitation: StoreInvitation) -> str:
    store = TorchStore(invitation)
    try:
        dist.init_process_group("paceline", store=store, rank=rank, world_size=2, timeout=worlds.TIMEOUT)
    except dist.DistError as error:
        return str(error)
    finally:
        store.close()
    dist.destroy_process_group()
    return "began"


def test_a_rank_that_comes_twice_is_told_and_the_others_begin(crew: Crew) -> None:
    with StoreServer() as server:
        for process, rank in enumerate((0, 1, 1)):
            crew.start(begin_as, rank, server.invitation, ranks=[process])
        told = crew.finish()
    assert told[0] == "began"
    assert sorted(text == "began" for text in told[1:]) == [False, True]
    assert any("rank 1 is taken by process" in text for text in told[1:])


def test_worlds_of_different_size_are_told(crew: Crew) -> None:
    where = f"file://{worlds.new_file()}"
    for rank, size in ((0, 3), (1, 3), (2, 4)):
        crew.start(fail_to_begin, rank, where, size, worlds.TIMEOUT, ranks=[rank])
    for told in crew.finish():
        assert "WrongCall" in told
        assert "rank 2 expects a world of 4" in told or "rank 0 expects a world of 3" in told


def hold_a_store(_: None, port: int) -> None:
    store = TCPStore("127.0.0.1", port, None, is_master=True, wait_for_workers=False)
    say("there")
    store.wait(["never"], worlds.TIMEOUT)


def need_the_store(_: None, port: int) -> str:
    store = TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    say("there")
    try:
        dist.init_process_group("paceline", store=store, rank=1, world_size=2, timeout=worlds.TIMEOUT)
    except dist.DistStoreError as error:
        return str(error)
    return "began"


def test_a_store_that_dies_is_a_store_error(crew: Crew) -> None:
    port = free_port()
    crew.start(hold_a_store, port, ranks=[0])
    assert crew.hear(0) == "there"
    crew.start(need_the_store, port, ranks=[1])
    assert crew.hear(1) == "there"
    crew.kill(0)
    (told,) = crew.finish([1])
    assert "forming group 0 as rank 1 of 2: the store is gone" in told


def differ(_: None, rank: int, where: str) -> tuple[str, bool]:
    init(rank, where)
    try:
        dist.all_reduce(torch.ones(3 + rank // 2))
    except dist.DistBackendError as error:
        found = str(error), isinstance(error, errors.Mismatch)
    dist.destroy_process_group()
    return found


def test_tensors_that_do_not_fit_are_named_on_all_ranks(crew: Crew) -> None:
    each(crew, differ, f"file://{worlds.new_file()}")
    for text, is_mismatch in crew.finish():
        assert is_mismatch
        assert "float32[3]" in text
        assert "float32[4]" in text


def differ_in_sparse(_: None, rank: int, where: str) -> str:
    init(rank, where)
    with pytest.raises(errors.Mismatch) as caught:
        dist.all_reduce(torch.eye(3 + rank // 2).to_sparse())
    dist.destroy_process_group()
    return str(caught.value)


def test_sparse_tensors_that_do_not_fit_are_named_on_all_ranks(crew: Crew) -> None:
    each(crew, differ_in_sparse, f"file://{worlds.new_file()}")
    for told in crew.finish():
        assert "rank 2 has [4, 4] where rank 0 has [3, 3]" in told


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_errors_arrive_as_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    told = translate(errors.OutOfSharedMemory("no room"))
    assert isinstance(told, dist.DistBackendError)
    assert isinstance(told, MemoryError)

    def refuse(*_: Any, **__: Any) -> Any:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    far: Any = SimpleNamespace(host="far.example", port=1)
    with pytest.raises(dist.DistNetworkError, match=r"far\.example:1 cannot be found: no such host"):
        listening_address(paceline.c10d.Options(), far)
    with pytest.raises(dist.DistBackendError, match="complex32"):
        movable(torch.zeros(2, dtype=torch.complex32).conj())


def test_a_timeout_names_who_was_waited_for(crew: Crew) -> None:
    each(crew, wait_but_stay, f"file://{worlds.new_file()}")
    told = crew.finish()[0]
    assert "waited 2 s" in told
    assert "(rank 1)" in told


def wait_but_stay(_: None, rank: int, where: str) -> str:
    init(rank, where, timeout=SHORT)
    told = ""
    try:
        if rank == 0:
            dist.recv(torch.zeros(3), 1)
        else:
            dist.barrier()
    except dist.DistBackendError as error:
        told = str(error)
    dist.destroy_process_group()
    return told


def wait_for_who_does_not_come(_: None, rank: int, where: str) -> str:
    init(rank, where)
    group: Any = dist.group.WORLD
    told = ""
    try:
        if rank == 1:
            dist.recv(torch.zeros(3), 0)
        else:
            group.monitored_barrier(timedelta(seconds=0.5))
    except dist.DistBackendError as error:
        told = str(error)
    dist.destroy_process_group()
    return told


def test_a_monitored_barrier_names_who_did_not_come(crew: Crew) -> None:
    each(crew, wait_for_who_does_not_come, f"file://{worlds.new_file()}")
    told = crew.finish()[0]
    assert "(rank 1)" in told


# -- a death ---------------------------------------------------------------------------------------------------------


def train_until_death(_: None, rank: int, where: str) -> dict[str, Any]:
    """What each way of waiting says when a member is killed."""
    init(rank, where)
    model = DistributedDataParallel(torch.nn.Linear(50, 50))
    pending = dist.irecv(torch.zeros(3), (rank + 1) % 3, tag=9)
    assert pending is not None
    say("under way")
    told: dict[str, Any] = {}
    try:
        while True:
            model(torch.ones(2, 50)).sum().backward()
    except RuntimeError as error:
        told["backward"] = str(error)
    for name, wait in (("recv", pending.wait), ("later", total)):
        with pytest.raises(dist.DistBackendError) as caught:
            wait()
        assert isinstance(caught.value, errors.PeerLost)
        told[name] = f"rank {caught.value.rank}: {caught.value}"
    dist.destroy_process_group()
    return told


def test_a_death_is_named_whatever_was_waited_for(crew: Crew) -> None:
    each(crew, train_until_death, f"file://{worlds.new_file()}")
    for rank in range(3):
        crew.hear(rank)
    crew.kill(1)
    for told in crew.finish([0, 2]):
        assert "(rank 1) died" in told["backward"]
        assert told["recv"].startswith("rank 1: recv from")
        assert told["later"].startswith("rank 1: all_reduce")


def test_a_store_keeps_no_connection_of_a_thread_that_has_ended() -> None:
    with StoreServer() as server, contextlib.closing(StoreClient(server.invitation)) as client:
        for number in range(5):
            thread = threading.Thread(target=client.add, args=("count", number))
            thread.start()
            thread.join()
        assert client.add("count", 0) == 10
        eventually(lambda: server._callers.num_connections() == 1, "the connections of the others end")
