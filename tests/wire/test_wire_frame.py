"""Every value survives the way through a frame; every byte string is a frame or a ProtocolError."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import ProtocolError
from paceline.wire import frame
from paceline.wire.dtypes import DTYPES, spec_of
from paceline.wire.frame import HANDSHAKE_LIMITS, MAGIC, PREFIX, SIZES, Header, Limits, TensorSpec

LIMITS = Limits()
SPECS = st.builds(
    TensorSpec,
    st.sampled_from(sorted(SIZES)),
    st.lists(st.integers(0, 100), max_size=4).map(tuple),
)
BODIES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def decode(data: bytes, limits: Limits = LIMITS) -> tuple[Header, int]:
    header_bytes, payload_bytes = frame.decode_prefix(data[: PREFIX.size], limits)
    assert header_bytes == len(data) - PREFIX.size
    return frame.decode_header(data[PREFIX.size :], payload_bytes, limits), payload_bytes


def header_with(specs: Any, kind: Any = "k", body: Any = None) -> bytes:
    return msgspec.msgpack.encode([kind, body, specs])


@settings(deadline=None)
@given(kind=st.text(), body=BODIES, specs=st.lists(SPECS, max_size=8))
def test_what_is_encoded_is_decoded_again(kind: str, body: Any, specs: list[TensorSpec]) -> None:
    header, payload_bytes = decode(frame.encode(kind, body, specs))
    assert header.kind == kind
    assert header.tensors == tuple(specs)
    assert payload_bytes == sum(math.prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in specs)
    assert msgspec.msgpack.decode(header.body) == body


@settings(deadline=None)
@given(payload_bytes=st.integers(0, LIMITS.payload_bytes))
def test_a_stream_announces_bytes_without_tensors(payload_bytes: int) -> None:
    header, announced = decode(frame.encode("stream", None, payload_bytes=payload_bytes))
    assert announced == payload_bytes
    assert header.tensors == ()


@pytest.mark.parametrize("dtype", sorted(SIZES))
def test_a_spec_counts_the_bytes_that_torch_counts(dtype: str) -> None:
    for shape in [(), (0,), (3, 5), (2, 0, 7)]:
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        assert spec_of(tensor) == TensorSpec(dtype, shape)
        assert spec_of(tensor).num_bytes() == tensor.numel() * tensor.element_size()


def test_a_type_that_cannot_be_sent_is_told_with_those_that_can() -> None:
    with pytest.raises(TypeError, match=r"uint16.*bfloat16"):
        spec_of(torch.zeros(2, dtype=torch.uint16))


# -- bytes of strangers ----------------------------------------------------------------------------------------------


def parses_or_is_refused(decode_bytes: Callable[[], object]) -> None:
    try:
        decode_bytes()
    except ProtocolError:
        return


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_any_bytes_are_a_prefix_or_a_protocol_error(data: bytes) -> None:
    parses_or_is_refused(lambda: frame.decode_prefix(data, LIMITS))


@settings(deadline=None)
@given(header_bytes=st.integers(0, 2**32 - 1), payload_bytes=st.integers(0, 2**64 - 1))
def test_a_prefix_passes_exactly_when_it_is_within_the_limits(header_bytes: int, payload_bytes: int) -> None:
    prefix = PREFIX.pack(MAGIC, header_bytes, payload_bytes)
    if header_bytes <= LIMITS.header_bytes and payload_bytes <= LIMITS.payload_bytes:
        assert frame.decode_prefix(prefix, LIMITS) == (header_bytes, payload_bytes)
    else:
        with pytest.raises(ProtocolError, match="over the limit"):
            frame.decode_prefix(prefix, LIMITS)


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1))
def test_any_bytes_are_a_header_or_a_protocol_error(data: bytes, payload_bytes: int) -> None:
    parses_or_is_refused(lambda: frame.decode_header(data, payload_bytes, LIMITS))


@settings(deadline=None)
@given(st.data())
def test_a_header_with_some_bytes_changed_parses_or_is_a_protocol_error(data: st.DataObject) -> None:
    specs = data.draw(st.lists(SPECS, max_size=3))
    good = frame.encode(data.draw(st.text()), data.draw(BODIES), specs)[PREFIX.size :]
    changed = bytearray(good)
    for position in data.draw(st.lists(st.integers(0, len(good) - 1), min_size=1, max_size=4)):
        changed[position] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(0, len(good)))] if data.draw(st.booleans()) else changed
    payload_bytes = sum(spec.num_bytes() for spec in specs)
    parses_or_is_refused(lambda: frame.decode_header(changed, payload_bytes, LIMITS).read_body(dict))


@settings(deadline=None)
@given(st.binary(max_size=60), st.sampled_from([str, int, bytes, list, dict, TensorSpec]))
def test_any_body_is_of_the_type_asked_for_or_a_protocol_error(data: bytes, body_type: type[Any]) -> None:
    header = Header("k", msgspec.Raw(data))
    parses_or_is_refused(lambda: header.read_body(body_type))


EXTENTS = st.integers(-2, 3) | st.sampled_from([2**31, 2**47, 2**48, 2**49, 2**63 - 1, 2**64 - 1, -(2**63)])


@settings(deadline=None)
@given(dtype=st.sampled_from([*SIZES, "float8", ""]), shape=st.lists(EXTENTS, max_size=70))
def test_a_shape_that_passes_can_be_made_by_torch(dtype: str, shape: list[int]) -> None:
    num_bytes = math.prod(shape) * SIZES.get(dtype, 1)
    try:
        header = frame.decode_header(header_with([[dtype, shape]]), max(0, num_bytes), LIMITS)
    except ProtocolError:
        return
    if num_bytes < 1 << 20:
        assert torch.empty(header.tensors[0].shape, dtype=DTYPES[dtype]).shape == tuple(shape)


NO_UTF8 = b"\xa2\xff\xfe"  # msgpack's short text of two bytes
ENDLESS = struct.pack(">BI", 0xDD, 2**32 - 1)  # msgpack's array of 4 billion


@pytest.mark.parametrize(
    ("header", "payload_bytes"),
    [
        pytest.param(b"", 0, id="nothing"),
        pytest.param(b"\x92" + NO_UTF8 + b"\xc0", 0, id="kind that is not UTF-8"),
        pytest.param(b"\x93\xa1k\xc0\x91\x92" + NO_UTF8 + b"\x90", 0, id="dtype that is not UTF-8"),
        pytest.param(b"\x93\xa1k\xc0" + ENDLESS, 0, id="4 billion tensors announced"),
        pytest.param(b"\x93\xa1k\xc0\x91\x92\xa5uint8" + ENDLESS, 0, id="4 billion extents announced"),
        pytest.param(b"\x93\xa1k" + b"\x91" * 100_000 + b"\xc0\x90", 0, id="nested 100,000 deep"),
        pytest.param(header_with([["uint8", [1]]] * 4097), 4097, id="too many tensors"),
        pytest.param(header_with([["uint8", [-1]]]), 0, id="negative extent"),
        pytest.param(header_with([["uint8", [-1, -4]]]), 4, id="negative extents with a positive product"),
        pytest.param(header_with([["uint8", [0, -1]]]), 0, id="negative extent beside zero"),
        pytest.param(header_with([["uint8", [2**63]]]), 2**63, id="huge extent"),
        pytest.param(header_with([["uint8", [0, 2**48, 2**48]]]), 0, id="extents whose strides overflow"),
        pytest.param(header_with([["uint8", [1] * 65]]), 1, id="too many dimensions"),
        pytest.param(header_with([["quint8", [1]]]), 1, id="unknown type"),
        pytest.param(header_with([["uint8", [1.0]]]), 1, id="extent that is no integer"),
        pytest.param(header_with([["uint8", [2]], ["int64", [1]]]), 9, id="payload one byte short"),
        pytest.param(header_with([["uint8", [2]], ["int64", [1]]]), 11, id="payload one byte long"),
        pytest.param(header_with([["uint8", [0]]]), 5, id="payload of an empty tensor"),
        pytest.param(header_with([], kind=7), 0, id="kind that is no text"),
    ],
)
def test_headers_that_must_be_refused_are_and_cost_no_memory(header: bytes, payload_bytes: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            frame.decode_header(header, payload_bytes, LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_bodies_that_are_not_what_was_expected_name_the_kind() -> None:
    for body in [NO_UTF8, b"\x91" * 100_000, b"", b"\x01"]:
        with pytest.raises(ProtocolError, match="'greeting'"):
            Header("greeting", msgspec.Raw(body)).read_body(str)


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        (PREFIX.pack(MAGIC, 2**32 - 1, 0), "header of 4294967295 bytes is over the limit of 1048576"),
        (PREFIX.pack(MAGIC, 1, 2**36 + 1), "payload of 68719476737 bytes is over the limit"),
        (b"GET / HTTP/1.1\r\n", "b'GET '.*not a Paceline peer"),
        (b"PLN1", "prefix of 4 bytes"),
    ],
)
def test_prefixes_that_must_be_refused_say_why(prefix: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        frame.decode_prefix(prefix, LIMITS)


def test_a_handshake_may_carry_neither_tensors_nor_payload_nor_a_long_header() -> None:
    with pytest.raises(ProtocolError, match="header of 4097"):
        frame.decode_prefix(PREFIX.pack(MAGIC, 4097, 0), HANDSHAKE_LIMITS)
    with pytest.raises(ProtocolError, match="payload of 1 "):
        frame.decode_prefix(PREFIX.pack(MAGIC, 10, 1), HANDSHAKE_LIMITS)
    with pytest.raises(ProtocolError, match="1 tensors"):
        frame.decode_header(header_with([["uint8", [0]]]), 0, HANDSHAKE_LIMITS)
