"""Frames arrive whole over every kind of socket, tensors go straight to their place, and every failure has a name."""

from __future__ import annotations

import os
import signal
import socket
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ConnectionLost, DeadlineExceeded, ProtocolError
from paceline.testing.eventually import eventually
from paceline.wire import frame
from paceline.wire.connection import RETRY_MS, TCP_RTO_MAX_MS, Connection, drop_sent
from paceline.wire.deadline import Deadline
from paceline.wire.dtypes import raw_bytes
from paceline.wire.waiting import Wanted
from tests.wire.helpers import EVERY_DTYPE, PAIRS, WAIT_S, connected, in_background, same_bits, some_tensor, soon

BIG = 24 << 20

every_pair = pytest.mark.parametrize("kind", PAIRS)


@every_pair
def test_a_frame_carries_tensors_of_every_type_and_shape(kind: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (5,), (2, 3, 4), (3, 0, 2), (1000, 7)]
    tensors = [some_tensor(dtype, shape) for dtype in EVERY_DTYPE for shape in shapes]
    with connected(kind) as (alice, bob):
        sending = in_background(lambda: alice.send("mixed", {"step": 7}, tensors, deadline=soon()))
        header, received = bob.receive(deadline=soon())
        sending.result(WAIT_S)
    assert header.kind == "mixed"
    assert header.read_body(dict) == {"step": 7}
    assert len(received) == len(tensors)
    assert all(map(same_bits, received, tensors))


@every_pair
def test_special_values_keep_their_bits(kind: str) -> None:
    tensors = [
        torch.tensor([float("nan"), -0.0, float("inf"), 1e-42], dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.complex64)
    ]
    with connected(kind) as (alice, bob):
        alice.send("odd", None, tensors, deadline=soon())
        _, received = bob.receive(deadline=soon())
    assert [bytes(raw_bytes(tensor)) for tensor in received] == [bytes(raw_bytes(tensor)) for tensor in tensors]


@every_pair
def test_frames_follow_each_other_and_both_directions_work(kind: str) -> None:
    with connected(kind) as (alice, bob):
        for number in range(50):
            alice.send("a", number, [torch.full((number,), number)], deadline=soon())
            bob.send("b", -number, deadline=soon())
        for number in range(50):
            header, (tensor,) = bob.receive(deadline=soon())
            assert header.read_body(int) == number
            assert tensor.tolist() == [number] * number
            assert alice.receive(deadline=soon())[0].read_body(int) == -number


@every_pair
def test_tensors_are_received_straight_into_those_given(kind: str) -> None:
    sent = [some_tensor(torch.float32, (3, 4)), some_tensor(torch.bool, (9,))]
    into = [torch.zeros(3, 4), torch.zeros(9, dtype=torch.bool)]
    places = [tensor.data_ptr() for tensor in into]
    with connected(kind) as (alice, bob):
        alice.send("t", None, sent, deadline=soon())
        _, received = bob.receive(deadline=soon(), into=into)
    assert [tensor.data_ptr() for tensor in received] == places
    assert all(map(same_bits, into, sent))


@pytest.mark.parametrize(
    "into",
    [
        [torch.zeros(4)],
        [torch.zeros(3, dtype=torch.float64)],
        [torch.zeros(3, 1)],
        [torch.zeros(3), torch.zeros(1)],
        [],
    ],
    ids=["longer", "other type", "other shape", "one more", "none"],
)
def test_a_wrong_destination_is_refused_naming_both(into: list[torch.Tensor]) -> None:
    with connected("unix") as (alice, bob):
        alice.send("t", None, [torch.ones(3)], deadline=soon())
        with pytest.raises(ProtocolError, match=r"alice sent float32\[3\] where .* was expected") as caught:
            bob.receive(deadline=soon(), into=into)
    expected = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in into) or "no tensor"
    assert f"where {expected} was expected" in str(caught.value)
    assert all(not tensor.any() for tensor in into), "nothing may be written to a destination that does not fit"


def test_only_plain_memory_has_raw_bytes() -> None:
    lazy = torch.ones(3, dtype=torch.complex64).conj()
    for tensor in (torch.zeros(4, 4).t()[1:], torch.zeros(2, device="meta"), lazy):
        with pytest.raises(TypeError):
            raw_bytes(tensor)
    assert len(raw_bytes(torch.zeros(3, 0))) == 0
    assert len(raw_bytes(torch.tensor(1.0, requires_grad=True))) == 4


def test_bytes_that_no_tensor_claims_are_refused() -> None:
    with connected("unix") as (alice, bob):
        alice.send_all([memoryview(frame.encode("stream", None, payload_bytes=9))], soon())
        with pytest.raises(ProtocolError, match=r"alice sent a 'stream' frame with 9 bytes"):
            bob.receive(deadline=soon())


def test_a_stream_is_received_by_who_knows_its_layout() -> None:
    with connected("unix") as (alice, bob):
        alice.send_all([memoryview(frame.encode("stream", None, payload_bytes=4)), memoryview(b"abcd")], soon())
        _, payload_bytes = bob.receive_header(deadline=soon())
        received = bytearray(payload_bytes)
        bob.receive_all(memoryview(received), soon())
    assert received == b"abcd"


def test_memory_that_the_host_does_not_have_is_a_protocol_error_that_names_the_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with connected("unix") as (alice, bob):
        alice.send("t", None, [torch.ones(3)], deadline=soon())
        monkeypatch.setattr(torch, "empty", no_memory)
        with pytest.raises(ProtocolError, match=r"alice sent float32\[3\], for which there is no memory"):
            bob.receive(deadline=soon())


@every_pair
def test_big_tensors_cross_in_both_directions_through_small_buffers(kind: str) -> None:
    there, back = torch.randint(0, 256, (2, BIG), dtype=torch.uint8)
    with connected(kind, buffer_bytes=64 << 10) as (alice, bob):

        def answer() -> list[torch.Tensor]:
            _, received = bob.receive(deadline=soon())
            bob.send("back", None, [back], deadline=soon())
            return received

        answering = in_background(answer)
        alice.send("there", None, [there], deadline=soon())
        _, received = alice.receive(deadline=soon())
        assert torch.equal(answering.result(WAIT_S)[0], there)
        assert torch.equal(received[0], back)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_both_directions_of_a_plain_connection_can_be_busy_at_once(kind: str) -> None:
    there, back = torch.randint(0, 256, (2, BIG), dtype=torch.uint8)
    with connected(kind, buffer_bytes=64 << 10) as (alice, bob):
        senders = [
            in_background(lambda: alice.send("there", None, [there], deadline=soon())),
            in_background(lambda: bob.send("back", None, [back], deadline=soon())),
        ]
        receiving = in_background(lambda: bob.receive(deadline=soon())[1])
        assert torch.equal(alice.receive(deadline=soon())[1][0], back)
        assert torch.equal(receiving.result(WAIT_S)[0], there)
        for sender in senders:
            sender.result(WAIT_S)


@every_pair
def test_more_pieces_than_go_in_one_call_arrive_in_order(kind: str) -> None:
    tensors = [torch.full((1 + number % 5,), number) for number in range(2000)]  # the kernel takes 1024 at once
    with connected(kind) as (alice, bob):
        sending = in_background(lambda: alice.send("many", None, tensors, deadline=soon()))
        _, received = bob.receive(deadline=soon())
        sending.result(WAIT_S)
    assert [tensor.tolist() for tensor in received] == [tensor.tolist() for tensor in tensors]


@settings(deadline=None)
@given(pieces=st.lists(st.binary(min_size=1, max_size=9), max_size=9), cut=st.integers(0, 81))
def test_what_was_sent_is_taken_off_the_queue_and_nothing_else(pieces: list[bytes], cut: int) -> None:
    whole = b"".join(pieces)
    cut = min(cut, len(whole))
    queue = deque(memoryview(piece) for piece in pieces)
    drop_sent(queue, cut)
    assert b"".join(queue) == whole[cut:]
    assert all(len(piece) for piece in queue)


# -- failures --------------------------------------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("num_sent", [0, 7, frame.PREFIX.size, 30, 1000])
def test_a_sender_that_closes_within_a_frame_is_named(kind: str, num_sent: int) -> None:
    whole = frame.encode("t", None, [frame.TensorSpec("uint8", (4096,))]) + bytes(4096)
    with connected(kind) as (alice, bob):
        if num_sent:
            alice.send_all([memoryview(whole)[:num_sent]], soon())
        alice.close()
        assert alice.closed
        with pytest.raises(ConnectionLost, match="alice"):
            bob.receive(deadline=soon())


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_sender_that_is_killed_within_a_tensor_is_named(kind: str) -> None:
    tensor = torch.zeros(BIG, dtype=torch.uint8)  # made here: torch's threads do not survive a fork
    with connected(kind, buffer_bytes=64 << 10) as (alice, bob):
        mine = socket.socket(fileno=os.dup(alice.fileno()))  # not registered, so the child keeps it
        child = os.fork()
        if child == 0:
            try:
                Connection(mine, peer="bob").send("t", None, [tensor], deadline=soon())
            finally:
                os._exit(1)
        try:
            mine.close()
            alice.close()
            header, _ = bob.receive_header(deadline=soon())
            bob.receive_all(memoryview(bytearray(1000)), soon())
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        with pytest.raises(ConnectionLost, match="alice"):
            bob.receive_tensors(header, deadline=soon())


@every_pair
def test_sending_to_a_peer_that_left_names_it(kind: str) -> None:
    with connected(kind) as (alice, bob):
        bob.close()
        with pytest.raises(ConnectionLost, match="bob"):
            alice.send("t", None, [torch.zeros(BIG)], deadline=soon())


@every_pair
def test_a_connection_that_was_closed_here_is_lost_not_another_error(kind: str) -> None:
    with connected(kind) as (alice, _):
        alice.close()
        alice.close()
        with pytest.raises(ConnectionLost, match="bob"):
            alice.send("t", None, deadline=soon())
        with pytest.raises(ConnectionLost, match="bob"):
            alice.receive(deadline=soon())


@every_pair
def test_waiting_for_a_silent_peer_ends_with_the_operation_and_the_peer(kind: str) -> None:
    with connected(kind) as (alice, bob):
        with pytest.raises(DeadlineExceeded, match=r"pull of step 3: waited 0.05 s for bytes from alice"):
            bob.receive(deadline=Deadline(0.05, "pull of step 3"))
        alice.send("late", 1, deadline=soon())
        assert bob.receive(deadline=soon())[0].kind == "late", "nothing was read, so the connection is still good"


@every_pair
def test_waiting_for_a_peer_that_does_not_read_ends_with_the_operation_and_the_peer(kind: str) -> None:
    with (
        connected(kind, buffer_bytes=64 << 10) as (alice, _),
        pytest.raises(DeadlineExceeded, match=r"push: waited 0.05 s for bob to take bytes"),
    ):
        alice.send("t", None, [torch.zeros(BIG)], deadline=Deadline(0.05, "push"))


def test_a_path_that_is_back_is_tried_again_soon_however_long_it_was_down() -> None:
    with socket.socket() as sock:
        try:
            sock.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS)
        except OSError as error:
            pytest.skip(f"this kernel has no bound for retries: {error}")
    with connected("tcp") as both:
        for one in both:
            assert one.socket.getsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS) == RETRY_MS


class AByteEachTime:
    """A peer that sends one byte whenever it is waited for, just in time."""

    def __init__(self, sender: Connection) -> None:
        self.sender = sender

    def wait_any(self, wanted: Wanted, deadline: Deadline, waited_for: str) -> None:
        self.sender.socket.send(b"x")


def test_a_peer_that_sends_a_byte_now_and_then_does_not_stretch_a_deadline() -> None:
    with connected("unix") as (alice, bob):
        bob.waiter = AByteEachTime(alice)
        with pytest.raises(DeadlineExceeded, match=r"a slow visitor: waited 0.02 s for bytes from alice"):
            bob.receive_all(memoryview(bytearray(1 << 18)), Deadline(0.02, "a slow visitor"))


def test_a_frame_that_is_refused_names_the_peer() -> None:
    with connected("unix") as (alice, bob):
        alice.socket.send(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(ProtocolError, match=r"alice: .*not a Paceline peer"):
            bob.receive(deadline=soon())


def test_limits_of_the_reader_hold() -> None:
    with connected("unix") as (alice, bob):
        alice.send("t", None, [torch.zeros(1024)], deadline=soon())
        with pytest.raises(ProtocolError, match="payload of 4096 bytes is over the limit of 4095"):
            bob.receive(deadline=soon(), limits=frame.Limits(payload_bytes=4095))


def test_what_tls_has_decrypted_already_is_not_forgotten() -> None:
    with connected("tls") as (alice, bob):
        alice.send_all([memoryview(b"0123456789")], soon())
        eventually(lambda: bob.receive_some(memoryview(bytearray(1))) == 1, "the first byte")
        assert bob.has_buffered()
        rest = bytearray(9)
        bob.receive_all(memoryview(rest), soon())
        assert rest == b"123456789"
        assert not bob.has_buffered()
